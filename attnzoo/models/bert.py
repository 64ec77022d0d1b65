"""BERT (Devlin et al. 2019, arXiv:1810.04805): the bidirectional model with a masked-language-modelling head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnzoo.models.transformer import Transformer


class BERT(Transformer):
    """Predicts masked tokens. Arguments as in `attnzoo.models.transformer.Transformer`, and

    type_vocab_size: the number of token types (segments), 0 for none. Without token_type_ids all tokens have type 0.
    A post-norm model also normalises its embeddings, as published. The head: a dense layer, GELU, a norm, the output matrix with a bias.
    """

    causal = False

    def __init__(self, *, type_vocab_size: int = 0, **config):
        super().__init__(**config)
        mlp = self.blocks[0].mlp
        self.type_embedding = nn.Embedding(type_vocab_size, self.dim) if type_vocab_size else None
        self.embedding_norm = nn.Identity() if self.blocks[0].pre_norm else self.make_norm()
        self.gelu = "tanh" if mlp.kind == "gelu_tanh" else "none"
        self.head_dense = nn.Linear(self.dim, self.dim, bias=mlp.up_proj.bias is not None)
        self.head_norm = self.make_norm()
        self.head_bias = nn.Parameter(torch.zeros(self.token_embedding.num_embeddings))
        self.init_weights()

    def head_input(self, x: Tensor) -> Tensor:
        return self.head_norm(F.gelu(self.head_dense(x), approximate=self.gelu))

    def head_products(self) -> int:
        return super().head_products() + self.head_dense.weight.numel()

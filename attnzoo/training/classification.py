"""Classification: one class for a whole sequence."""

from typing import Any

import torch
from torch import Tensor

from attnzoo.errors import UserError
from attnzoo.training.module import TokenPrediction

ENCODERS = ("attnzoo.models.BERT", "attnzoo.models.bert.BERT")


class Classification(TokenPrediction):
    """Trains a BERTClassifier; `labels` int64 (sequences,). See TokenPrediction; here each sequence is one target."""

    predicts_tokens = False

    @property
    def n_classes(self) -> int:
        return self.model.n_classes

    @staticmethod
    def model_config(model: dict[str, Any], task: dict[str, Any], data: Any) -> dict[str, Any]:
        """Turns a BERT's configuration into that of a BERTClassifier. UserError for other models, and for data without classes."""
        if not hasattr(data, "classes"):
            raise UserError("task=classification needs data with a class for each text; take data=listops or data=text_classification")
        if model["_target_"] not in ENCODERS:
            raise UserError(f"task=classification trains BERT encoders, not {model['_target_']}; take model=bert_tiny or another bert")
        target = "attnzoo.models.BERTClassifier"
        pairs = {"towers": data.towers} if getattr(data, "towers", 1) > 1 else {}
        return {**model, "_target_": target, "n_classes": len(data.classes), "pooling": task["pooling"], **pairs}

    def validation_metrics(self, loss: Tensor, accuracy: Tensor) -> dict[str, Tensor]:
        return {"val/loss": loss, "val/accuracy": accuracy}

    @torch.no_grad()
    def sample(self, tokenizer, tokens: list[int], max_new_tokens: int, temperature: float, seed: int) -> str:
        """The end of the text of `tokens`, and the probabilities of the three likeliest classes. For pairs, the second
        text is that of the first validation pair."""
        data, context = self.trainer.datamodule, self.model.train_context
        tokens, classes = tokens[:context], data.classes
        sequences = [tokens] if self.model.towers == 1 else [tokens, data.documents("validation")[1]["input_ids"][:context].tolist()]
        self.model.eval()
        lengths = torch.tensor([0, *map(len, sequences)]).cumsum(0)
        packed = {"cu_seqlens": lengths.int().to(self.device), "max_seqlen": max(map(len, sequences))}
        shares = self.model(torch.tensor(sum(sequences, []), device=self.device), **packed)[0].float().softmax(-1)
        likely = shares.topk(min(3, len(classes)))
        answers = ", ".join(f"{classes[i]} {100 * share:.0f} %" for share, i in zip(*(x.tolist() for x in likely), strict=True))
        return f"{'… ' * (len(tokens) > 96)}{tokenizer.decode(tokens[-96:])}│{answers}"

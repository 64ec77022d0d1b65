"""Masked language modelling: predict the masked tokens."""

import torch

from attnzoo.training.module import TokenPrediction


class MaskedLanguageModeling(TokenPrediction):
    """Trains a BERT. See TokenPrediction."""

    @torch.no_grad()
    def sample(self, tokenizer, tokens: list[int], max_new_tokens: int, temperature: float, seed: int) -> str:
        """The text of `tokens` with every seventh token masked and filled in by the likeliest one, between ‹ and ›."""
        tokens = tokens[: self.model.train_context]
        masked = range(3, len(tokens), 7)
        input_ids = torch.tensor([tokens], device=self.device)
        input_ids[0, masked] = tokenizer.mask_id
        self.model.eval()
        filled = self.model(input_ids)[0, masked].argmax(-1).tolist()
        text, begin = "", 0
        for position, token in zip(masked, filled, strict=True):
            text += f"{tokenizer.decode(tokens[begin:position])}‹{tokenizer.decode([token])}›"
            begin = position + 1
        return text + tokenizer.decode(tokens[begin:])

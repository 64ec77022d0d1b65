"""Language modelling: predict the next token."""

import torch

from attnzoo.training.module import TokenPrediction


class LanguageModeling(TokenPrediction):
    """Trains a GPT. See TokenPrediction."""

    @property
    def sample_length(self) -> int:
        return min(32, max(1, self.model.train_context // 4))

    @torch.no_grad()
    def sample(self, tokenizer, tokens: list[int], max_new_tokens: int, temperature: float, seed: int) -> str:
        """The text of `tokens`, and the model's continuation of it, within the training context; tokens that leave it no room are cut."""
        context = self.model.train_context
        prompt = tokens[: context - 1]
        generator = torch.Generator(self.device).manual_seed(seed)
        input_ids = torch.tensor([prompt], device=self.device)
        n_new = min(max_new_tokens, context - len(prompt))
        output = self.model.generate(input_ids, n_new, temperature=temperature, generator=generator)[0].tolist()
        return f"{tokenizer.decode(prompt)}│{''.join(tokenizer.decode_stream(output[len(prompt) :], prompt))}"

"""FIRE's bias (Li et al. 2024, arXiv:2310.04418): a small MLP whose input is the key's distance relative to the query's position."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 32  # hidden units of the MLP, as in the authors' code


class FireBias(nn.Module):
    """f(log(1 + c d) / log(1 + c max(L, i))) per head, for query i, key j and d = i - j. Parameters have the authors' names.

    `mlp` is f. `c` and L = `L_multiplier` * `init_L` are learned; the initial L is `threshold`. For queries up to position L the bias
    depends on the distance alone. For later queries the same function is stretched over the i keys before the query.
    """

    def __init__(self, n_heads: int, threshold: float):
        super().__init__()
        self.threshold = threshold
        self.mlp = nn.Sequential(nn.Linear(1, WIDTH), nn.ReLU(), nn.Linear(WIDTH, n_heads))
        self.c, self.L_multiplier = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(()))
        self.register_buffer("init_L", torch.empty(()))

    def draw(self) -> None:
        """Initialises the parameters like the authors."""
        for layer in (self.mlp[0], self.mlp[2]):
            layer.reset_parameters()
        nn.init.constant_(self.c, 0.1)
        nn.init.constant_(self.L_multiplier, 1.0)
        nn.init.constant_(self.init_L, self.threshold)

    def forward(self, position: Tensor, distance: Tensor) -> Tensor:
        """The bias, (..., n_heads, rows, keys), at least float32. position: (..., rows), of the queries in their sequences. distance:
        (..., rows, keys), at least 0."""
        dtype = torch.promote_types(self.c.dtype, torch.float32)
        weights = [x.to(dtype) for layer in (self.mlp[0], self.mlp[2]) for x in (layer.weight, layer.bias)]
        with torch.autocast(position.device.type, enabled=False):  # 16 bits do not represent large positions exactly
            c = self.c.to(dtype)
            farthest = torch.maximum(position.to(dtype), (self.L_multiplier * self.init_L).to(dtype).abs())
            share = torch.log1p((c * distance).abs()) / (torch.log1p((c * farthest).abs()) + 1e-6)[..., None]
            hidden = F.relu(F.linear(share[..., None], *weights[:2]))
            return F.linear(hidden, *weights[2:]).movedim(-1, -3)

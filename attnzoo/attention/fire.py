"""FIRE's bias (Li et al. 2024, arXiv:2310.04418): a small network of how far a key is, as a share of how far its query could look."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 32  # of the network, as the authors have it


class FireBias(nn.Module):
    """f(log(1 + c d) / log(1 + c max(L, i))) of the distance d = i - j, by head, with the authors' names of parameters.

    `mlp` is f. `c` and L = `L_multiplier` * `init_L` are learned; L begins as `threshold`. Up to L tokens all queries have one function of
    the distance; beyond, it is stretched over what a query sees.
    """

    def __init__(self, n_heads: int, threshold: float):
        super().__init__()
        self.threshold = threshold
        self.mlp = nn.Sequential(nn.Linear(1, WIDTH), nn.ReLU(), nn.Linear(WIDTH, n_heads))
        self.c, self.L_multiplier = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(()))
        self.register_buffer("init_L", torch.empty(()))

    def draw(self) -> None:
        """As the authors begin."""
        for layer in (self.mlp[0], self.mlp[2]):
            layer.reset_parameters()
        nn.init.constant_(self.c, 0.1)
        nn.init.constant_(self.L_multiplier, 1.0)
        nn.init.constant_(self.init_L, self.threshold)

    def forward(self, position: Tensor, distance: Tensor) -> Tensor:
        """position (..., rows) of queries in their sequences, distance (..., rows, keys) from 0 on; (..., n_heads, rows, keys), float32."""
        dtype = torch.promote_types(self.c.dtype, torch.float32)
        weights = [x.to(dtype) for layer in (self.mlp[0], self.mlp[2]) for x in (layer.weight, layer.bias)]
        with torch.autocast(position.device.type, enabled=False):  # 16 bits do not count far
            c = self.c.to(dtype)
            farthest = torch.maximum(position.to(dtype), (self.L_multiplier * self.init_L).to(dtype).abs())
            share = torch.log1p((c * distance).abs()) / (torch.log1p((c * farthest).abs()) + 1e-6)[..., None]
            hidden = F.relu(F.linear(share[..., None], *weights[:2]))
            return F.linear(hidden, *weights[2:]).movedim(-1, -3)

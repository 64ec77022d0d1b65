"""Decoding token by token with a KV cache. On a GPU a CUDA graph saves the host the kernel launches of each token."""

import copy
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from attnzoo.attention.cache import PAGE, KVCache, Newest, block_table
from attnzoo.attention.joint import joined
from attnzoo.models.blocks import in_compute_dtype

AHEAD = 8  # number of tokens that are queued on a GPU before the host reads the first of them
WARM_UP = 2  # decoding steps after the first token and before a graph is captured; they compile kernels and let libraries allocate
GRAPHED = WARM_UP + 2  # number of the first token that a graph computes, counted from 1
PAGES_FROM = 2**17  # sharing pages is faster if the copies of a common beginning have this many tokens together, as measured on a GPU


class Decoding:
    """Draws the next token of each row, again and again; see `GPT.stream` for the arguments. Only `on_host` makes the host wait.

    With a graph or `lengths` the caches have a fixed size, and the position of each row's next token is kept on the device only. The draws
    are the same with and without a graph.
    """

    def __init__(self, model: nn.Module, input_ids: Tensor, max_new_tokens: int, *, lengths: Tensor | None = None, temperature: float = 1.0,
                 top_k: int | None = None, top_p: float | None = None, generator: torch.Generator | None = None,
                 graph: bool | None = False, samples: int = 1, shared: int = 0, pages: bool | None = None):
        _check(model, input_ids, max_new_tokens, lengths, temperature, top_k, top_p, samples, shared, pages)
        self.model, self.input_ids, self.max_new_tokens, self.lengths, self.samples = model, input_ids, max_new_tokens, lengths, samples
        self.shared = shared
        self.how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "generator": generator}
        reason = why_no_graph(model, input_ids.device)
        if graph and reason:
            raise ValueError(f"graph=true: {reason}; null takes a graph where there can be one")
        self.graphed = reason is None if graph is None else graph
        self.on_device = self.graphed or lengths is not None
        copies = input_ids.shape[0] * samples * shared if shared else samples * input_ids.shape[1] if samples > 1 else 0
        self.pages = self.on_device and input_ids.is_cuda and _reads_pages(model) and copies >= PAGES_FROM if pages is None else pages
        max_len = input_ids.shape[1] + max_new_tokens
        pages = [block.attention.page for block in model.blocks if self.on_device] + [PAGE] * self.pages
        max_len += -max_len % max(pages, default=1)  # all are powers of two
        self.caches = model.new_cache(input_ids.shape[0], max_len) if model.supports.cache else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.drawn: Tensor | None = None  # (batch * samples, 1), the tokens drawn last
        self.n_drawn = 0
        device = input_ids.device.type
        # autocast's cache would free weights that it cast before the capture, while the graph still reads them
        self._autocast = {"device_type": device, "dtype": torch.get_autocast_dtype(device), "enabled": torch.is_autocast_enabled(device),
                          "cache_enabled": not self.on_device}

    @torch.no_grad()
    def step(self) -> Tensor:
        """The next token of each text, (batch * samples, 1), on the device; the next step may overwrite it. -1 where logits are NaN and
        tokens are drawn. Uses the autocast state that was active when the object was made."""
        if self.n_drawn >= self.max_new_tokens:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: this many tokens have been drawn already")
        if self.graphed and self.graph is None and self.n_drawn > WARM_UP:
            self._capture()
        with torch.autocast(**self._autocast):
            if self.graph is not None:
                self.graph.replay()
            elif self.n_drawn == 0:
                self._read()
            elif self.on_device:
                self._draw_newest()
            else:
                self._draw(self.drawn)
        self.n_drawn += 1
        return self.drawn

    def rewind(self) -> None:
        """Returns to the state after the first drawn token."""
        self.n_drawn = 1
        self.drawn.copy_(self._first)
        if self.on_device:
            self.positions.copy_(self._read_tokens)
        for cache in self.caches or ():
            cache.length = self.input_ids.shape[1]

    def on_host(self, stop: Sequence[int] = ()) -> Iterator[Tensor]:
        """Yields up to max_new_tokens tensors of tokens, (batch * samples, 1), on the CPU. Ends early once each row has drawn one of
        `stop`; a row that has done so repeats that token. A GPU is some tokens ahead. Raises ValueError if logits are NaN and tokens
        are drawn; the likeliest token of NaN (temperature 0) is one like any other."""
        stops = torch.tensor(list(stop), dtype=torch.int64)
        last = finished = None
        for drawn in self._copies():
            if (drawn < 0).any():
                raise ValueError("the model's logits are NaN, from which no token can be drawn")
            if stop:
                drawn = drawn if last is None else torch.where(finished, last, drawn)
                last, finished = drawn, torch.isin(drawn, stops)
            yield drawn
            if stop and finished.all():
                return

    def _copies(self) -> Iterator[Tensor]:
        on_gpu = self.input_ids.is_cuda
        under_way: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        for n in range(1, self.max_new_tokens + 1):
            drawn = self.step().to("cpu", non_blocking=on_gpu, copy=True)
            under_way.append((drawn, torch.cuda.current_stream(self.input_ids.device).record_event() if on_gpu else None))
            while len(under_way) > (AHEAD if on_gpu and n < self.max_new_tokens else 0):
                drawn, copied = under_way.popleft()
                if copied is not None:
                    copied.synchronize()
                yield drawn

    def _read(self) -> None:
        """Reads the prompts and draws the first token after them."""
        batch, seqlen = self.input_ids.shape
        ends = torch.full((batch,), seqlen, device=self.input_ids.device) if self.lengths is None else self.lengths.long()
        if self.shared:
            self.caches = read_once(self.model, self.input_ids[0, : self.shared], batch, self.caches[0].max_len)
        last = torch.arange(batch, device=self.input_ids.device) * (seqlen - self.shared) + ends - self.shared - 1
        logits = self.model(self.input_ids[:, self.shared :], cache=self.caches, logits_at=last)
        if self.samples > 1:
            rows = torch.arange(batch, device=self.input_ids.device).repeat_interleave(self.samples)
            for cache in self.caches or ():
                cache.take(rows)
            self.input_ids, logits, ends = (x[rows] for x in (self.input_ids, logits, ends))
        if self.pages:
            first = torch.arange(0, ends.shape[0], self.samples, device=ends.device).repeat_interleave(self.samples)
            table = block_table(ends.shape[0], self.caches[0].max_len, [(first, ends), (torch.zeros_like(first), self.shared)], ends.device)
            for cache in self.caches:
                cache.block_table = table
        if self.on_device:
            self.fast = _prepared(self.model)
            self._read_tokens, self.positions = ends, ends.clone()
        self.drawn = self._drawn_from(logits)
        self._first = self.drawn.clone()

    def _draw(self, newest: Tensor) -> None:
        """One step where the host knows the cache's length. A variant without a cache reads the whole text again."""
        if self.caches is None:
            self.input_ids = newest = torch.cat([self.input_ids, newest], dim=1)
        last = torch.arange(1, newest.shape[0] + 1, device=newest.device) * newest.shape[1] - 1
        self.drawn = self._drawn_from(self.model(newest, cache=self.caches, logits_at=last))

    def _draw_newest(self) -> None:
        """One step with the positions on the device. This is what a graph captures."""
        newest = Newest(self.positions, self.caches[0].max_len)
        for cache in self.caches:
            cache.newest = newest
        # calls forward directly to skip the module's hooks, which cannot be part of a graph
        logits = self.fast.forward(self.drawn.clamp(min=0), cache=self.caches)[:, -1]
        self.drawn.copy_(self._drawn_from(logits))
        self.positions += 1

    def _drawn_from(self, logits: Tensor) -> Tensor:
        return draw(logits.float(), **self.how)

    def _capture(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        if self.how["generator"] is not None:
            self.graph.register_generator_state(self.how["generator"])
        with torch.autocast(**self._autocast), torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self._draw_newest()


def read_once(model: nn.Module, beginning: Tensor, rows: int, max_len: int) -> list[KVCache]:
    """Caches of `rows` texts of up to max_len tokens that all begin with `beginning`, int64 (tokens,). It is read once and copied."""
    caches = model.new_cache(1, max_len)
    model(beginning[None], cache=caches, logits_at=torch.full((1,), beginning.shape[0] - 1, device=beginning.device))
    for cache in caches:
        cache.take(torch.zeros(rows, dtype=torch.int64, device=beginning.device))
    return caches


def why_no_graph(model: nn.Module, device: torch.device) -> str | None:
    """Why decoding cannot be a CUDA graph; None where it can."""
    if device.type != "cuda":
        return f"it needs a GPU, got {device.type}"
    if not model.supports.cache:
        return "the attention has no cache"
    others = _decoding_by_host(model)
    return f"attention={others} asks the host how long a cache is" if others else None


def _decoding_by_host(model: nn.Module) -> str:
    """The names of the variants in its layers that need token positions on the host while decoding."""
    return ", ".join(sorted({block.attention.name for block in model.blocks if not block.attention.decodes_on_device}))


def draw(logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
         generator: torch.Generator | None = None) -> Tensor:
    """One token per row of logits (batch, vocab_size), as (batch, 1), or -1 where a probability is NaN; options as in `GPT.stream`."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    weights = (logits / temperature).softmax(-1)
    if top_p is not None:
        ordered, indices = weights.sort(-1, descending=True)
        # a token is dropped if the likelier ones already sum to p; the first always stays
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)
        weights = torch.zeros_like(weights).scatter(-1, indices, ordered)
    # the same draw as torch.multinomial, which would wait for the device to check the weights
    score, token = (weights / torch.empty_like(weights).exponential_(generator=generator)).max(-1, keepdim=True)
    return token.masked_fill(score.isnan(), -1)


def _check(model: nn.Module, input_ids: Tensor, max_new_tokens: int, lengths: Tensor | None, temperature: float, top_k: int | None,
           top_p: float | None, samples: int, shared: int, pages: bool | None) -> None:
    if input_ids.dim() != 2 or input_ids.shape[1] < 1:
        raise ValueError(f"input_ids: must be (batch, seqlen) with at least one token, got shape {tuple(input_ids.shape)}")
    if max_new_tokens < 0 or temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(f"max_new_tokens={max_new_tokens}, temperature={temperature} must be at least 0, top_k={top_k} at least 1")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: must lie in (0, 1]; None draws from all tokens")
    if samples < 1:
        raise ValueError(f"samples={samples}: must be at least 1")
    if lengths is not None:
        if lengths.shape != input_ids.shape[:1] or lengths.is_floating_point() or lengths.device != input_ids.device:
            raise ValueError(f"lengths: must be whole numbers of shape ({input_ids.shape[0]},) on {input_ids.device}, got {lengths.dtype} "
                             f"of shape {tuple(lengths.shape)} on {lengths.device}")
        others = _decoding_by_host(model)
        if others or not model.supports.cache:
            raise ValueError(f"lengths: attention={others} takes no rows of unlike lengths; read them one by one")
        if not (1 <= lengths.min() and lengths.max() <= input_ids.shape[1]):
            raise ValueError(f"lengths: must lie between 1 and the rows' {input_ids.shape[1]} tokens, got {lengths.tolist()}")
    if shared:
        shortest = input_ids.shape[1] if lengths is None else int(lengths.min())
        if not 0 < shared < shortest or not (input_ids[:, :shared] == input_ids[:1, :shared]).all():
            raise ValueError(f"shared={shared}: must be less than the shortest row's {shortest} tokens, and all rows must begin with the "
                             "same tokens up to there")
        if not model.reads_in_parts:
            raise ValueError(f"shared={shared}: this model has no cache, or reading a text in parts changes its results; leave it out")
    if pages and not _reads_pages(model):
        raise ValueError("pages=True: no layer of this model reads pages, as those of attention=flash do; leave it out")
    # the last token drawn is never read
    model._check_length(input_ids.shape[1] + max_new_tokens - 1)


def _reads_pages(model: nn.Module) -> bool:
    return model.supports.cache and any(block.attention.reads_pages for block in model.blocks)


def _prepared(model: nn.Module) -> nn.Module:
    """A copy of the model in eval mode, prepared for fast decoding. Weights of linear layers are cast to autocast's dtype, the matrices of
    an attention layer's `projections` are concatenated, what is the same for all tokens is computed (`Attention.prepare_to_decode`), and
    kernels are joined: sums with norms, and a tanh GELU with the product before it. All other tensors are shared with the model."""
    own = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    fast = copy.deepcopy(model, own).eval()
    if fast.head is None:
        fast.head = nn.Linear(*reversed(model.head_matrix.shape), bias=False, device="meta")
        fast.head.weight = model.head_matrix
    fast.joins_norms = True
    exact = {layer for block in fast.blocks for part in block.attention.in_float32 for layer in part.modules()}
    for module in fast.modules():
        if isinstance(module, nn.Linear) and module not in exact:
            module.weight = _compute(module.weight)
    for block in fast.blocks:
        up, kind = block.mlp.up_proj, block.mlp.kind
        block.mlp.joins_gelu = kind == "gelu_tanh" and up.weight.is_cuda and up.weight.itemsize == 2 and up.bias is not None
        for module in block.modules():
            kept = module is up and kind != "swiglu" and not block.mlp.joins_gelu  # bias_gelu adds its bias in float32
            if isinstance(module, nn.Linear) and module.bias is not None and not kept and module not in exact:
                module.bias = _compute(module.bias)
        attention = block.attention
        attention.prepare_to_decode()
        projections = attention.projections
        attention.joined = joined(projections)
        for projection, rows in zip(projections, attention.joined[0].split([p.out_features for p in projections]), strict=True):
            projection.weight = nn.Parameter(rows, requires_grad=False)
    return fast


def _compute(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(in_compute_dtype(weight.detach()) if weight.dtype == torch.float32 else weight.detach(), requires_grad=False)

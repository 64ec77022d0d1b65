"""A kernel launch that keeps what is the same in all calls of one layout. Sizes may change from call to call."""

from dataclasses import dataclass, field
from typing import Any

# assertions on the device replace checks for which the host would have to wait; checks of every sum for overflow are off
ASSERTING = {"debug": True, "sanitize_overflow": False}


@dataclass
class Launch:
    """From the second call on, the compiled kernel is called directly, and Triton does not inspect every argument. So the caller keeps one
    Launch for each combination of device, dtypes, strides and alignment that the kernel is specialised on. Integers that it is not
    specialised on must stay below 2**31.
    """

    kernel: Any
    constants: dict  # in the order of the kernel's signature
    num_warps: int
    options: dict = field(default_factory=lambda: ASSERTING)
    compiled: Any = None

    def __call__(self, programs: int, *arguments):
        if self.compiled is not None:
            self.compiled[(programs, 1, 1)](*arguments, *self.constants.values())
        else:  # the interpreter compiles nothing and always comes here
            self.compiled = self.kernel[(programs,)](*arguments, **self.constants, num_warps=self.num_warps, **self.options)

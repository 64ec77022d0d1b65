"""The entries of the Hopper forwards' tile tables. This module does not import Gluon."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardTile:
    """A tile of 64 rows for each consumer and block_n keys. `_gluon.forward_kernel.Config` says what the switches do."""

    block_n: int
    stages: int
    consumers: int = 2
    registers: int = 240
    q_slots: int = 1  # 1: the queries are copied to registers, unless `part` is given
    joint_release: bool = False
    k_before_pv: bool = False
    prefetch_tile: bool = False
    row_max_not_negative: bool = False
    programs: int = 1  # persistent programs of a multiprocessor
    part: int | None = None  # columns of a TMA box of queries, keys and output; None: all columns in one box

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def constants(self) -> dict:
        return {"BLOCK_N": self.block_n, "STAGES": self.stages, "CONSUMERS": self.consumers, "REGISTERS": self.registers,
                "Q_SLOTS": self.q_slots, "JOINT_RELEASE": self.joint_release, "K_BEFORE_PV": self.k_before_pv,
                "PREFETCH_TILE": self.prefetch_tile}

"""What a tile table says of a Hopper forward. It needs no Gluon."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardTile:
    """64 rows a consumer and block_n keys; `_gluon.forward.Config` tells what the switches do."""

    block_n: int
    stages: int
    consumers: int = 2
    registers: int = 240
    q_slots: int = 1  # 1: the queries move on to registers
    joint_release: bool = False
    k_before_pv: bool = False
    prefetch_tile: bool = False
    row_max_not_negative: bool = False
    programs: int = 1  # of a multiprocessor
    part: int | None = None  # queries and keys are loaded, and the output is stored, by so many columns; None: by all

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def constants(self) -> dict:
        return {"BLOCK_N": self.block_n, "STAGES": self.stages, "CONSUMERS": self.consumers, "REGISTERS": self.registers,
                "Q_SLOTS": self.q_slots, "JOINT_RELEASE": self.joint_release, "K_BEFORE_PV": self.k_before_pv,
                "PREFETCH_TILE": self.prefetch_tile}

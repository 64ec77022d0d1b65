"""The uniform registers that descriptors of matrix products are made of, followed through the machine code of a Hopper kernel."""

import re
from dataclasses import dataclass, field

START = -1  # the line of a register's value at the kernel's start, which nothing has set
# what parts of descriptors are made by: moves, shifts and masks of addresses, and sums that a sum of 64 bits consists of
PARTS = re.compile(r"(UMOV|R2UR|USGXT|ULOP3|USHF|ULEA|UIMAD)\b|UIADD3\.(64|X)\b|UIADD3 UR\d+, UP\d")
SUMS = re.compile(r"UIADD3|UMOV UR\d+, UR")  # of these, those whose operands are parts of descriptors themselves


@dataclass
class Instruction:
    line: int
    text: str
    writes: list[int]  # uniform registers
    reads: list[int]
    predicated: bool


@dataclass
class Block:
    """Instructions that always follow each other, and the blocks that may come next."""

    instructions: list[Instruction] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    falls_through: bool = True


def unset_descriptors(listing: list[str]) -> list[str]:
    """Descriptors of products that are made, on some path, of a register which was not set for them: ptxas 12.8 was seen to set a register
    in front of one loop and to read it in the next one, also where the first loop is skipped (COMPILER_FAULTS.md, faults 8 and 22).

    A register that still holds part of an older descriptor is not noticed.
    """
    blocks, labels = _blocks(listing)
    following = [[labels[name] for name in block.targets] + [n + 1] * (block.falls_through and n + 1 < len(blocks))
                 for n, block in enumerate(blocks)]
    before = _definitions(blocks, following)
    place = {i.line: (n, k) for n, block in enumerate(blocks) for k, i in enumerate(block.instructions)}
    complaints = {}
    for n, block in enumerate(blocks):
        for k, product in enumerate(block.instructions):
            seen, waiting = set(), [(n, k, register) for register in product.reads] if "HGMMA" in product.text else []
            while waiting:
                if (read := waiting.pop()) in seen:
                    continue
                seen.add(read)
                for line in _reaching(blocks, before, *read):
                    block_of, at = place.get(line, (0, 0))
                    setter = blocks[block_of].instructions[at] if line != START else None
                    if setter is None or setter.predicated or not PARTS.match(setter.text):
                        complaints.setdefault((read[2], line), f"line {product.line}: UR{read[2]} of a descriptor comes from "
                                              + (setter.text if setter else "nowhere"))
                    elif SUMS.match(setter.text):
                        waiting += [(block_of, at, register) for register in setter.reads]
    return list(complaints.values())


def _blocks(listing: list[str]) -> tuple[list[Block], dict[str, int]]:
    blocks, labels = [Block()], {}
    for number, line in enumerate(listing):
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            if blocks[-1].instructions:
                blocks.append(Block())
            labels[label[1]] = len(blocks) - 1
        elif code := re.match(r"\s*/\*[0-9a-f]{4,5}\*/\s+(@!?U?P\w+\s+)?(.*?)\s*;", line):
            predicated, text = code[1] is not None, code[2]
            block = blocks[-1]
            block.instructions.append(Instruction(number, text, *_registers(text), predicated))
            if ends := re.match(r"(BRA|BRX|EXIT)\b", text):
                block.targets = re.findall(r"\.L_x_\d+", line)
                block.falls_through = predicated
                if ends[1] != "EXIT" or not predicated:
                    blocks.append(Block())
    return blocks, labels


def _registers(text: str) -> tuple[list[int], list[int]]:
    """The uniform registers that an instruction writes and reads."""
    name, _, rest = text.partition(" ")
    if name.startswith("HGMMA"):  # a first operand in registers leaves half of the four to the second one
        first, half = int(re.search(r"gdesc\[UR(\d+)\]", text)[1]), re.match(r"R\d+, R\d+, gdesc", rest)
        return [], [first + n for n in range(2 if half else 0, 4)]
    pair = ".64" in name or ".WIDE" in name
    operands = [[int(n) + m for n in re.findall(r"\bUR(\d+)", operand) for m in range(1 + pair)] for operand in rest.split(",")]
    sets = re.match(r"(?!UTMA|UBLK)(U|S2UR|R2UR|VOTEU)", name) is not None
    return operands[0] if sets else [], sum(operands[sets:], [])


def _definitions(blocks: list[Block], following: list[list[int]]) -> list[dict[int, set[int]]]:
    """For each block the lines that may have set each register before it."""
    before = [{} for _ in blocks]
    before[0] = {register: {START} for register in range(64)}
    waiting = list(range(len(blocks)))
    while waiting:
        n = waiting.pop(0)
        after = dict(before[n])
        for i in blocks[n].instructions:
            for register in i.writes:
                after[register] = {i.line} | (after.get(register, set()) if i.predicated else set())
        for m in following[n]:
            news = {register: lines for register, lines in after.items() if not lines <= before[m].get(register, set())}
            before[m] |= {register: before[m].get(register, set()) | lines for register, lines in news.items()}
            if news and m not in waiting:
                waiting.append(m)
    return before


def _reaching(blocks: list[Block], before: list[dict[int, set[int]]], n: int, k: int, register: int) -> set[int]:
    """The lines that may have set a register which instruction k of block n reads."""
    lines = set()
    for i in reversed(blocks[n].instructions[:k]):
        if register in i.writes:
            lines.add(i.line)
            if not i.predicated:
                return lines
    return lines | before[n].get(register, set())

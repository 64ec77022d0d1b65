"""The search for descriptors that are made of registers which nothing has set."""

from machine_code import unset_descriptors

PRODUCT = "HGMMA.64x128x16.F32 R24, gdesc[UR16], R24"
FIRST_LOOP = ["UIADD3 UR4, UP0, UR12, 0x2, URZ", ".L_x_1:", "BAR.SYNC.DEFER_BLOCKING 0x0", "@P0 BRA `(.L_x_1)"]
SECOND_LOOP = [".L_x_2:", "UIADD3 UR16, UP0, UR4, 0x2, URZ", PRODUCT, "@P1 BRA `(.L_x_2)", "EXIT"]


def listing(*code: str) -> list[str]:
    """As nvdisasm prints it."""
    return [line if line.startswith(".L") else f"        /*{16 * n:04x}*/                   {line} ;" for n, line in enumerate(code)]


def test_a_register_that_a_skipped_loop_sets_is_found():
    others = ["UMOV UR12, 0x10", "UMOV UR17, 0x40000040", "UMOV UR18, 0x20", "UMOV UR19, 0x40000040"]
    skipped = listing(*others, "@P2 BRA `(.L_x_2)", *FIRST_LOOP, *SECOND_LOOP)
    assert unset_descriptors(skipped) == [f"line {skipped.index(skipped[-3])}: UR4 of a descriptor comes from nowhere"]
    stale = listing(*others, "ULDC UR4, c[0x0][0x570]", "@P2 BRA `(.L_x_2)", *FIRST_LOOP, *SECOND_LOOP)
    assert [text.partition(": ")[2] for text in unset_descriptors(stale)] == ["UR4 of a descriptor comes from ULDC UR4, c[0x0][0x570]"]
    assert unset_descriptors(listing(*others, *FIRST_LOOP, *SECOND_LOOP)) == []
    assert unset_descriptors(listing(*others, "UMOV UR4, 0x12", "@P2 BRA `(.L_x_2)", *FIRST_LOOP, *SECOND_LOOP)) == []


def test_operands_in_registers_leave_half_of_the_descriptor_unused():
    code = ["UMOV UR18, 0x20", "UMOV UR19, 0x40000040", "HGMMA.64x128x16.F32 R88, R152, gdesc[UR16].tnspB, R88", "EXIT"]
    assert unset_descriptors(listing(*code)) == []
    assert len(unset_descriptors(listing(*code[1:]))) == 1

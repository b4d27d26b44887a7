import os

from data.machine import available_memory


def test_available_memory_is_a_part_of_the_machine():
    available = available_memory()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert available is None or 0 <= available <= total

"""The allocator against a dictionary: what was written stays, numbers of moved pages are right."""

from __future__ import annotations

import mmap
import resource
import sys
from unittest import mock

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.kv import page_pool
from quantkit.kv.page_pool import PAGE, PagePool, slots_of

on_linux = pytest.mark.skipif(sys.platform != "linux",
                              reason="the KV cache grows in place on Linux only; other systems copy it")

LAYOUT = {"codes": ((4,), torch.int8), "scale": ((), torch.bfloat16), "pair": ((2, 3), torch.float32)}
PAGE_BYTES = PAGE * (4 + 2 + 24)


def write(pages, page, value):
    """Every slot of a page says whose it is."""
    slots = torch.tensor(slots_of([page], 0, PAGE))
    pages.write(slots, {name: torch.full((PAGE, *shape), value, dtype=dtype)
                        for name, (shape, dtype) in LAYOUT.items()})


def content(pages, page):
    found = {float(x) for name in LAYOUT for x in pages.read(name, torch.tensor([[page]])).unique()}
    assert len(found) == 1, f"page {page} holds {found}"
    return found.pop()


@pytest.mark.parametrize("smallest", [1, page_pool.SMALLEST])
@settings(max_examples=120, deadline=None)
@given(st.lists(st.one_of(st.tuples(st.just("take"), st.integers(0, 9)),
                          st.tuples(st.just("give"), st.integers(0, 12)),
                          st.tuples(st.just("shrink"), st.just(0))), max_size=40), st.randoms())
def test_random_taking_giving_and_shrinking(smallest, steps, random):
    with mock.patch.object(page_pool, "SMALLEST", smallest):
        random_steps(steps, random, moves=smallest != 1 or sys.platform != "linux")


def random_steps(steps, random, moves):
    pages, owned, name = PagePool(LAYOUT), {}, 0  # page → what was written there
    for what, count in steps:
        total = pages.allocated_bytes // PAGE_BYTES
        if what == "take":
            free, ever = total - len(owned), pages.total
            got = pages.allocate(count)
            assert len(set(got)) == count and not owned.keys() & set(got)
            if count <= free:
                assert pages.total == ever, "it grew for no reason"
            assert pages.total <= max(len(owned) + count, ever + ever // 8)
            for page in got:
                if page >= ever:
                    assert content(pages, page) == 0, "new memory is not zero"
            for page in got:
                name = name % 100 + 1
                write(pages, page, name)
                owned[page] = name
        elif what == "give":
            gone = random.sample(sorted(owned), min(count, len(owned)))
            pages.free(gone)
            for page in gone:
                del owned[page]
        else:
            moved = pages.shrink()
            assert moved is None or moved
            assert not (moved or {}).keys() - owned.keys(), "a free page moved"
            assert moves or moved is None
            owned = {(moved or {}).get(page, page): value for page, value in owned.items()}
            after = pages.allocated_bytes // PAGE_BYTES
            assert after == (len(owned) if (total - len(owned)) * 4 > total else total)
        assert pages.used == len(owned)
        assert all(0 <= page < pages.total for page in owned)
        assert pages.total * PAGE_BYTES == pages.allocated_bytes or not moves
        for page, value in owned.items():
            assert content(pages, page) == value


def test_the_lowest_pages_are_taken_first():
    pages = PagePool(LAYOUT)
    assert pages.allocate(5) == [0, 1, 2, 3, 4]
    pages.free([3, 1])
    assert pages.allocate(2) == [1, 3]


def test_bytes_are_those_of_the_tensors():
    pages = PagePool(LAYOUT)
    assert (pages.allocated_bytes, pages.used, pages.page_bytes) == (0, 0, PAGE_BYTES)
    pages.allocate(3)
    assert pages.allocated_bytes == 3 * PAGE_BYTES == sum(p.nbytes for p in pages.parts.values())
    assert {name: (p.shape, p.dtype) for name, p in pages.parts.items()} == {
        name: (torch.Size((3, PAGE, *shape)), dtype) for name, (shape, dtype) in LAYOUT.items()}


def test_growth_is_an_eighth_and_memory_shrinks_when_a_quarter_is_free():
    pages = PagePool(LAYOUT)
    pages.allocate(80)
    pages.allocate(1)
    assert pages.allocated_bytes == 90 * PAGE_BYTES
    pages.free(range(60, 73))
    assert pages.used == 68 and pages.shrink() is None and pages.allocated_bytes == 90 * PAGE_BYTES
    pages.free([73])
    assert pages.shrink() == dict(zip(range(74, 81), range(60, 67), strict=True))
    assert pages.allocated_bytes == 67 * PAGE_BYTES == 67 * pages.page_bytes
    pages.free(range(67))
    assert pages.shrink() is None and pages.allocated_bytes == 0


@pytest.mark.parametrize("operation", ["new_zeros", "clone"])
@pytest.mark.parametrize("lacking, smallest", [  # of three parts all are copied, or two
    (1, page_pool.SMALLEST), (2, page_pool.SMALLEST), (0, 8 * PAGE * 24), (1, 8 * PAGE * 24)])
def test_without_memory_everything_stays_as_it_was(monkeypatch, operation, lacking, smallest):
    """The allocator keeps its parts in step: all of them grow or shrink, or none."""
    monkeypatch.setattr(page_pool, "SMALLEST", smallest)
    pages = PagePool(LAYOUT)
    for page in pages.allocate(8):
        write(pages, page, page + 1)
    pages.free([0, 1, 2])
    made, allocate = [], getattr(torch.Tensor, operation)

    def short(*arguments):
        made.append(arguments)
        if len(made) > lacking:
            raise MemoryError
        return allocate(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, operation, short)
        with pytest.raises(MemoryError):
            pages.allocate(9) if operation == "new_zeros" else pages.shrink()
    assert pages.used == 5 and pages.allocated_bytes == 8 * PAGE_BYTES
    assert [content(pages, page) for page in range(3, 8)] == [4, 5, 6, 7, 8]
    assert pages.allocate(3) == [0, 1, 2] and pages.allocate(2) == [8, 9]


@on_linux
def test_a_large_block_grows_and_shrinks_where_it_is():
    pages, process = PagePool({"x": ((4096,), torch.float32)}), psutil.Process()  # 1 MiB a page
    pages.allocate(8)
    place, before = pages.parts["x"].data_ptr(), process.memory_info().rss
    taken = pages.allocate(120)
    assert process.memory_info().rss - before < 16 << 20, "memory that nobody has written"
    pages.parts["x"][taken] = 1.0
    assert process.memory_info().rss - before > 100 << 20
    pages.free(taken[20:100])
    assert pages.shrink() is None and pages.used == 48
    assert (pages.total, pages.allocated_bytes) == (128, 48 << 20)
    assert process.memory_info().rss - before < 60 << 20, "what is free went back to the system"
    assert all(bool((pages.parts["x"][page] == 1.0).all()) for page in [*taken[:20], *taken[100:]])
    assert not bool(pages.parts["x"][taken[20:100]].any())
    pages.free(taken[100:])
    assert pages.shrink() is None and pages.total == 28, "what was behind is gone too"
    new = pages.allocate(60)
    assert pages.parts["x"].data_ptr() == place and not bool(pages.parts["x"][new].any())
    assert pages.allocated_bytes == pages.total << 20


@on_linux
def test_memory_that_is_locked_is_overwritten(monkeypatch):
    class Locked(mmap.mmap):
        def madvise(self, *given):
            raise OSError("locked")

    monkeypatch.setattr(mmap, "mmap", Locked)
    pages = PagePool({"x": ((4096,), torch.float32)})
    taken = pages.allocate(8)
    pages.parts["x"][taken] = 1.0
    pages.free([5, 6, 7, 1])
    assert pages.shrink() is None and pages.total == 5 and pages.allocate(5) == [1, 5, 6, 7, 8]
    assert [bool(page.any()) for page in pages.parts["x"][:9]] == [*[True, False, True, True, True],
                                                                   *[False] * 4]


@on_linux
def test_where_addresses_are_limited_none_are_reserved(monkeypatch, tmp_path):
    def limited():
        page_pool._addresses_limited.cache_clear()
        return page_pool.reserve(1 << 20, torch.device("cpu")) is None

    try:
        assert not limited() and page_pool.reserve((1 << 20) - 1, torch.device("cpu")) is None
        with monkeypatch.context() as patch:
            patch.setattr(resource, "getrlimit", lambda limit: (1 << 40, resource.RLIM_INFINITY))
            assert limited()
        strict = tmp_path / "overcommit_memory"
        strict.write_text("2\n")
        monkeypatch.setattr(page_pool, "_OVERCOMMIT", strict)
        assert limited()
    finally:
        page_pool._addresses_limited.cache_clear()


@on_linux
def test_memory_that_is_kept_is_taken_at_once():
    pages, before = PagePool({"x": ((4096,), torch.float32)}), psutil.Process().memory_info().rss
    pages.preallocate(100)
    assert psutil.Process().memory_info().rss - before > 90 << 20
    pages.free(pages.allocate(40))
    assert pages.shrink() is None and psutil.Process().memory_info().rss - before > 90 << 20


@on_linux
@pytest.mark.parametrize("error", [OSError, ValueError])
def test_where_no_addresses_can_be_reserved_a_block_is_copied(monkeypatch, error):
    monkeypatch.setattr(mmap, "mmap", mock.Mock(side_effect=error("no")))
    pages = PagePool({"x": ((4096,), torch.float32)})
    for page in pages.allocate(8):
        pages.parts["x"][page] = page
    pages.allocate(8)
    assert pages.parts["x"][:, 0, 0].tolist() == [*map(float, range(8)), *[0.0] * (pages.total - 8)]


@on_linux
def test_a_block_outgrows_its_addresses(monkeypatch):
    monkeypatch.setattr(page_pool, "MINIMUM", 1)
    monkeypatch.setattr(page_pool, "GROWTH", 1)
    pages, places = PagePool({"x": ((4096,), torch.float32)}), set()
    for count in range(1, 12):
        (page,) = pages.allocate(1)
        pages.parts["x"][page] = count
        places.add(pages.parts["x"].data_ptr())
    assert len(places) > 1 and pages.parts["x"][:11, 0, 0].tolist() == [*map(float, range(1, 12))]


@on_linux
def test_derived_parts_and_what_is_left_of_them():
    pages = PagePool({"x": ((4096,), torch.float32)})
    pages.allocate(4)
    pages.add_derived({"y": ((4096,), torch.float32)})
    pages.parts["y"][3] = 1.0
    pages.allocate(4)
    assert bool((pages.parts["y"][3] == 1.0).all()) and not bool(pages.parts["y"][4:].any())
    pages.forget_derived()
    assert set(pages.parts) == {"x"} and pages.allocated_bytes == pages.total * pages.page_bytes
    pages.add_derived({"y": ((4096,), torch.float32)})
    assert not bool(pages.parts["y"].any())


@pytest.mark.parametrize("smallest", [1, page_pool.SMALLEST])
@pytest.mark.parametrize("inside", [True, False])
def test_memory_of_inference_mode_can_be_given_back_outside_of_it(inside, smallest, monkeypatch):
    monkeypatch.setattr(page_pool, "SMALLEST", smallest)
    with torch.inference_mode():
        pages = PagePool(LAYOUT)
        for page in pages.allocate(8):
            write(pages, page, page + 1)
        pages.free([0, 1, 2])
    with torch.inference_mode(inside):
        moved = pages.shrink()
    assert pages.allocated_bytes == 5 * PAGE_BYTES
    assert [*(moved or {})] == ([5, 6, 7] if pages.total == 5 else [])
    assert {content(pages, (moved or {}).get(page, page)) for page in range(3, 8)} == {4, 5, 6, 7, 8}


def test_slots_of_pages():
    assert slots_of([7, 2], 62, 4) == [7 * PAGE + 62, 7 * PAGE + 63, 2 * PAGE, 2 * PAGE + 1]
    assert slots_of([7], 5, 0) == []


def test_pages_in_a_row():
    pages = PagePool({"x": ((1,), torch.float32)})
    pages.allocate(3)
    pages.write(torch.arange(3 * PAGE), {"x": torch.arange(3.0 * PAGE)[:, None]})
    got = pages.read("x", torch.tensor([[2, 0], [1, 1]]))
    assert got.shape == (2, 2, PAGE, 1)
    one = torch.arange(float(PAGE))
    assert torch.equal(got.flatten(1), torch.stack((torch.cat((one + 2 * PAGE, one)),
                                                 torch.cat((one + PAGE, one + PAGE)))))


def test_what_a_page_holds_beside_its_slots_moves_with_it():
    pages = PagePool({"x": ((), torch.float32)}, shared={"scale": ((3,), torch.bfloat16)})
    assert pages.allocate(6) == list(range(6)) and pages.page_bytes == PAGE * 4 + 3 * 2
    values = {name: torch.arange(6.0)[:, None].expand(6, size) for name, size in (("x", PAGE), ("scale", 3))}
    pages.write_pages(torch.arange(6), values)
    pages.free([0, 1, 2, 4])
    moved = pages.shrink()
    assert moved == {3: 0, 5: 1}
    table = torch.tensor([[0, 1]])
    assert pages.read("x", table)[0, :, 7].tolist() == [3, 5]
    found = pages.read("scale", table)
    assert found.shape == (1, 2, 3) and found[0, :, 2].tolist() == [3, 5]

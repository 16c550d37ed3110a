"""A prompt's rows by a library's products of dequantized weights: right, and alike in any company."""

import pytest
import torch

from quantkit.evaluation.speed.decoding import keep_pages
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import parse_kv
from quantkit.ops import gpu
from quantkit.runtime.engine import Engine
from quantkit.runtime.gpu import graphs, prompts
from quantkit.runtime.gpu.prompts import SIZES, USUAL, PromptProducts
from quantkit.runtime.loader import load
from quantkit.runtime.memory import scratch
from quantkit.runtime.sampler import Sampling
from quantkit.testing import tiny_model
from quantkit_kernels.triton import w4a16, w8a8, w16a16
from quantkit_kernels.triton.levels import quantize
from quantkit_kernels.triton.matmul import multiply

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
         "dtype": "float32"}


@pytest.fixture(autouse=True)
def simulated(monkeypatch, request):
    if request.node.get_closest_marker("gpu"):
        return
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the kernels run on it instead")
    monkeypatch.setattr(gpu, "SIMULATE", True)


def packed(n=96, k=160, gated=False):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scale = 0.01 + torch.rand(n, k // 32, generator=generator) / 100
    exact = (codes.double() - 8) * scale.double().repeat_interleave(32, 1)
    return w4a16.pack(codes, scale, gated=gated), exact


def products(numbers=96 * 160):
    return PromptProducts(numbers, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(("m", "sizes", "portions"), [
    (1, SIZES, [128]), (128, SIZES, [128]), (300, SIZES, [512]), (700, SIZES, [512, 128, 128]),
    (1024, SIZES, [512] * 2), (1100, SIZES, [2048]), (2048, SIZES, [2048]), (5, (512,), [512]),
    (2048, (512,), [512] * 4)])
def test_portions_have_room_for_all_rows(m, sizes, portions):
    assert list(prompts._portions(m, sizes)) == portions and sum(portions) >= m


@pytest.mark.parametrize("has", [(), ("bias",), ("residual",), ("bias", "residual")])
def test_products_are_those_of_our_kernels(has):
    w, exact = packed()
    x = torch.randn(131, 160)
    added = {"bias": torch.randn(96), "residual": torch.randn(131, 96)}
    options = {name: added[name] for name in has}
    y = products().multiply(x, w, **options)
    wanted = x.double() @ exact.T + sum(value.double() for value in options.values())
    ours = multiply(x, w, **options)
    assert (y - wanted).abs().max() <= 4 * max((ours - wanted).abs().max(), 1e-6)
    out = torch.empty(131, 100)[:, :96]
    assert products().multiply(x, w, out=out, **options) is out and torch.equal(out, y)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("has", [{"gated": "silu"}, {"bias": torch.arange(96.0)},
                                 {"residual": torch.ones(131, 96), "bias": torch.arange(96.0)}])
def test_levels_are_multiplied_as_they_are(kind, has):
    """Whole numbers' sums are exact, so that the bits are those of our kernels."""
    codes = (40 * torch.randn(96, 160, generator=torch.Generator().manual_seed(1))).to(kind)
    w = w8a8.pack(codes, torch.linspace(0.01, 0.02, 96), mode=None if kind == torch.int8 else "e4m3",
                  gated="gated" in has)
    rows = torch.randn(131, 160, generator=torch.Generator().manual_seed(2))
    multiplies, x = products(128 * 160), quantize(rows, kind)
    y, ours = multiplies.multiply(x, w, **has), multiply(x, w, **has)
    assert (y - ours).abs().max() <= (0 if kind == torch.int8 else 1e-5 * ours.abs().max())
    last = {name: value[-1:] if name == "residual" else value for name, value in has.items()}
    alone = multiplies.multiply(quantize(torch.ones(131, 160), kind), w, **has)[-1:]
    assert torch.equal(multiplies.multiply(quantize(torch.ones(1, 160), kind), w, **last), alone)
    assert products(100 * 160 // 4).multiply(x, w, **has) is None  # no room


def test_gates_open_afterwards():
    w, exact = packed(gated=True)
    x = torch.randn(3, 160)
    gate, up = (x.double() @ exact.T).chunk(2, 1)
    y = products().multiply(x, w, gated="silu")
    assert torch.allclose(y.double(), torch.nn.functional.silu(gate) * up, atol=1e-5, rtol=1e-5)


def test_a_row_has_the_same_bits_however_many_there_are_and_wherever_it_stands():
    """Also where a library gives it others by the number of rows, or by its place."""
    w, _ = packed()
    x, multiplies = torch.randn(700, 160), products()
    alone = multiplies.multiply(x[:1], w)
    for rows in (2, 128, 129, 600, 700):
        assert torch.equal(multiplies.multiply(x[:rows], w)[:1], alone)
        assert torch.equal(multiplies.multiply(x[:rows].flip(0), w)[-1:], alone)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_levels_on_a_gpu(kind):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    codes = (40 * torch.randn(6144, 4096, device="cuda")).to(kind)
    w = w8a8.pack(codes, torch.full((6144,), 0.01, device="cuda"))
    multiplies = PromptProducts(6144 * 4096, torch.bfloat16, codes.device)
    x = torch.randn(2100, 4096, device="cuda", dtype=torch.bfloat16)
    alone = multiplies.multiply(quantize(x[:1], w.decoder.takes[0]), w)
    print(kind, w.mode, *multiplies._proven.values())
    if alone is None:
        assert kind != torch.int8
        return
    y, ours = (product(quantize(x, w.decoder.takes[0]), w) for product in (multiplies.multiply, multiply))
    assert torch.equal(y[:1], alone) and (y - ours).norm() < 1e-2 * ours.norm()
    assert kind != torch.int8 or torch.equal(y, ours)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (200, 96)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_on_a_gpu(n, k, dtype):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    weight = torch.randn(n, k, device="cuda").to(dtype)
    multiplies = PromptProducts(n * k, dtype, weight.device)
    w, x = w16a16.pack(weight), torch.randn(2100, k, device="cuda").to(dtype)
    alone = multiplies.multiply(x[:1], w)
    print(n, k, dtype, *multiplies._proven.values())
    if alone is None:  # no size gives a row the same bits wherever it stands: then it stays so
        assert [*multiplies._proven.values()] == [()] and multiplies.multiply(x, w) is None
        return
    exact = x.double() @ weight.double().T
    theirs = (x @ weight.T - exact).norm()
    for rows in (2, 129, 700, 2100):
        y = multiplies.multiply(x[:rows], w)
        assert torch.equal(y[:1], alone) and torch.equal(multiplies.multiply(x[:rows].flip(0), w)[-1:], alone)
    assert (y - exact).norm() <= 1.1 * theirs


def test_sizes_that_give_a_row_other_bits_are_not_used(monkeypatch):
    w, _ = packed()
    product = prompts._product

    def by_size(x, weight, bias, residual, out):
        product(x, weight, bias, residual, out)
        if len(x) != USUAL:
            out *= 1 + 2.0**-20

    monkeypatch.setattr(prompts, "_product", by_size)
    multiplies = products()
    assert multiplies.multiply(torch.randn(4, 160), w) is not None
    assert set(multiplies._proven.values()) == {(USUAL,)}

    for place in (slice(1, None, 2), slice(USUAL - 1, USUAL)):
        def by_place(x, weight, bias, residual, out, place=place):
            product(x, weight, bias, residual, out)
            out[place] *= 1 + 2.0**-20

        monkeypatch.setattr(prompts, "_product", by_place)
        multiplies = products()
        assert multiplies.multiply(torch.randn(600, 160), w) is None or USUAL not in (
            multiplies._proven.popitem()[1])

    def at_the_end(x, weight, bias, residual, out):
        product(x, weight, bias, residual, out)
        out[1900:] *= 1 + 2.0**-20

    monkeypatch.setattr(prompts, "_product", at_the_end)
    multiplies = products()
    assert multiplies.multiply(torch.randn(4, 160), w) is not None
    assert set(multiplies._proven.values()) == {(128, USUAL)}


def test_a_weight_that_has_no_room_is_left_to_our_kernels():
    assert products(96 * 160 - 1).multiply(torch.randn(4, 160), packed()[0]) is None


@torch.inference_mode()
def test_a_graph_has_the_bits_of_single_operations(tmp_path, monkeypatch):
    """The first portions of a size go operation by operation; the next ones are graphs, padded with tokens
    that are nobody's, of several sequences too."""
    monkeypatch.setattr(graphs, "OFTEN", 1)
    loaded = load(str(tiny_model(tmp_path / "m", **SMALL)))
    cache = KVCache(loaded.config, parse_kv("int8"), loaded.dtype, loaded.model.device)
    ids = torch.randint(4, 300, (60,), generator=torch.Generator().manual_seed(0))

    def read(*counts):
        rows = [cache.add() for _ in counts]
        logits = loaded.model.forward([ids[:count].tolist() for count in counts],
                                      Batch(cache, rows, "prefill_end"), [1] * len(counts))
        return logits

    keep_pages(cache, 8, 64)  # so that nothing moves
    made, sizes = graphs.PromptGraphs._graph, []
    monkeypatch.setattr(graphs.PromptGraphs, "_graph",
                        lambda self, run, size: sizes.append(size) or made(self, run, size))
    first = read(60)
    assert not sizes
    again, several = read(60), read(60, 17, 40)
    assert sizes == [128, 128]
    assert torch.equal(first, again) and torch.equal(several[:1], first)
    assert torch.equal(several[1:2], read(17))


@torch.inference_mode()
def test_decoded_tokens_are_multiplied_by_our_kernels(tmp_path, monkeypatch):
    """One by one, and those that a request had written before it gave up its pages."""
    loaded = load(str(tiny_model(tmp_path / "m", **SMALL)))
    cache = KVCache(loaded.config, parse_kv("none"), loaded.dtype, loaded.model.device)
    calls = []
    monkeypatch.setattr(PromptProducts, "multiply", lambda self, x, w, **options: calls.append(len(x)))
    row = cache.add()
    loaded.model(torch.tensor([[5, 6, 7]]), cache=Batch(cache, [row], "prefill_end"))
    assert set(calls) == {3}
    calls.clear()
    loaded.model(torch.tensor([[8]]), cache=Batch(cache, [row], "decode"))
    loaded.model(torch.tensor([[9, 10]]), cache=Batch(cache, [row], "decode"))
    assert calls == []


def test_its_memory_is_known_before(tmp_path):
    loaded = load(str(tiny_model(tmp_path / "m", **SMALL)))
    taken = loaded.model._program.prompts.nbytes
    assert taken == scratch.dequantized_bytes(loaded.config, loaded.dtype)


@torch.inference_mode()
def test_what_is_captured_at_the_start_serves_for_all_steps(tmp_path, monkeypatch):
    """Of any number of sequences, whatever they hold: nothing moves that a graph reads."""
    monkeypatch.setattr(graphs, "PORTIONS", (16, 128))
    loaded = load(str(tiny_model(tmp_path / "m", **SMALL, max_position_embeddings=128)))
    engine = Engine(loaded, kv=parse_kv("int4"), max_batch=3, memory=1 << 20)
    on_device = loaded.model._on_device(engine.cache)
    assert sum(1 for _ in on_device.warm_up(3, 128, 1)) == 5
    decoding, prompts_of = dict(on_device._graphs._graphs), dict(on_device._prompt_graphs._graphs)
    assert {size for size, _ in decoding} == {1, 2, 4} and set(prompts_of) == {16, 128}
    for count in (100, 3, 17):
        engine.submit(list(range(4, 4 + count)), Sampling(max_tokens=6, ignore_eos=True))
    while engine.step():
        pass
    assert on_device._graphs._graphs == decoding and on_device._prompt_graphs._graphs == prompts_of


@pytest.mark.parametrize(("kv", "reads"), [
    ("none", [3]), ("int4", [3]), ("window(70)+int4", [3]), ("snapkv(0.5, window=4)", [])])
def test_several_prompts_go_through_the_model_at_once(tmp_path, monkeypatch, kv, reads):
    """In a cache of a fixed size, where no page moves, unless a policy holds each of them until its end."""
    loaded = load(str(tiny_model(tmp_path / "m", **SMALL)))
    prompts_of = [list(range(4, 4 + count)) for count in (30, 5, 12)]

    def answers(together):
        engine, steps = Engine(loaded, kv=parse_kv(kv), max_batch=3, memory=1 << 22), 0
        submitted, moves = [], engine.cache.move_counter.count
        for prompt in prompts_of:
            submitted.append(engine.submit(prompt, Sampling(max_tokens=3, ignore_eos=True)))
            while not together and engine.step():
                pass
        while engine.step():
            steps += 1
        assert engine.cache.move_counter.count == moves
        return [request.result.token_ids for request in submitted], engine.stats()["steps"]

    calls, forward = [], type(loaded.model).forward
    monkeypatch.setattr(type(loaded.model), "forward", lambda self, tokens, batch, wanted: (
        calls.append(len(tokens)), forward(self, tokens, batch, wanted))[1])
    together, fewer = answers(True)
    assert calls == reads
    alone, more = answers(False)
    assert together == alone and fewer < more

"""A model that runs in other threads than the one that opened the block: recorded as anywhere, and never mixed up."""

import functools
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import regard
from regard.recorder import RefusedWarning
from regard.recorder.hooks import other_threads, tap
from support.toy_models import Attention

WAIT = 120  # seconds after which a test that would hang fails


class Eager(Attention):
    """Attention that is written out; `between` is called between the softmax and the product with the values."""

    def between(self):
        pass

    def forward(self, x):
        q, k, v = self.heads(x)
        w = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        self.between()
        return x + (w @ v).transpose(1, 2).flatten(2)


class Call(nn.Module):
    """Calls a function and hands its input on: the place where threads wait for each other."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        self.function()
        return x


def model(kind=Attention, layers=3):
    torch.manual_seed(0)
    return nn.Sequential(*[kind() for _ in range(layers)]).eval()


def sequence(length, seed=0):
    return torch.randn(1, length, 8, generator=torch.Generator().manual_seed(seed))


def in_threads(*functions):
    """The results of functions that run in threads of their own, at once."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(WAIT) for future in [pool.submit(function) for function in functions]]


def without_grad(function, *args):
    """A function for a thread: gradients are switched off in each thread by itself."""

    def run():
        torch.set_num_threads(1)
        with torch.no_grad():
            return function(*args)

    return run


def assert_right(layers, net, x):
    """The weights of every layer of a pass are those that the model computes from x."""
    attending = [module for module in net if isinstance(module, Attention)]
    assert len(layers) == len(attending)
    with torch.no_grad():
        for module in net:
            if isinstance(module, Attention):
                torch.testing.assert_close(layers[attending.index(module)].weights.dense(), module.weights(x))
            x = module(x)


@pytest.mark.parametrize("kind", [Attention, Eager])
@pytest.mark.parametrize("options", [{}, {"values": True}, {"layers": [0, 2]}])
def test_a_forward_in_a_pool_is_recorded(kind, options):
    net, x = model(kind), sequence(5)
    with regard.record(net, **options) as seen:
        in_threads(without_grad(net, x))
    with torch.no_grad(), regard.record(net, **options) as here:
        net(x)
    assert seen.refused == []
    assert [layer.name for layer in seen.layers] == [layer.name for layer in here.layers]
    for one, other in zip(seen.layers, here.layers, strict=True):
        torch.testing.assert_close(one.weights.dense(), other.weights.dense())


def test_statistics_and_files_of_another_thread(tmp_path):
    net, x = model(), sequence(5)
    with regard.record(net, keep="statistics") as seen:
        in_threads(without_grad(net, x))
    with torch.no_grad():
        expected = regard.Weights.from_dense(net[0].weights(x)).entropy()
    torch.testing.assert_close(seen.layers[0].statistics["entropy"], expected)
    with regard.record(net, path=tmp_path / "run.regard"):
        in_threads(without_grad(net, x))
    assert_right(regard.load(tmp_path / "run.regard").passes[0].layers, net, x)


def test_gradients_reach_the_model_from_another_thread():
    net, x = model(), sequence(5)
    with regard.record(net, grad=True) as seen:
        in_threads(lambda: net(x))
    seen[1].entropy().sum().backward()
    assert net[0].qkv.weight.grad.abs().sum() > 0


def test_a_part_that_runs_in_another_thread_is_recorded():
    """generate() calls an encoder outside the model's own forward; so may anybody."""
    net, x = model(), sequence(5)
    with regard.record(net) as seen:
        in_threads(without_grad(net[1], x))
    assert [layer.name for layer in seen.layers] == ["1"]
    assert_right(seen.layers, [net[1]], x)


class Methods(nn.Module):
    """A model without a forward, whose methods attend with its parameters: no hook is called in them."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(8, 24, generator=torch.Generator().manual_seed(0)))

    def fused(self, x):
        return nn.functional.scaled_dot_product_attention(*self.project(x))

    def written_out(self, x):
        q, k, v = self.project(x)
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    def project(self, x):
        return (x @ self.qkv).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)


def in_a_thread(function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join(WAIT)
    return result[0]


@pytest.fixture
def older_pool():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result(WAIT)
        yield pool


@pytest.mark.parametrize("method", ["fused", "written_out"])
@pytest.mark.parametrize("where", ["a thread", "a pool", "a pool that is older than the block"])
def test_a_method_that_attends_itself_is_recorded(method, where, older_pool):
    net, x = Methods(), sequence(5)
    work = without_grad(getattr(net, method), x)
    expected = work()
    with regard.record(net) as seen:
        if where == "a thread":
            y = in_a_thread(work)
        elif where == "a pool":
            (y,) = in_threads(work)
        else:
            y = older_pool.submit(work).result(WAIT)
    assert torch.equal(y, expected)
    assert seen.refused == []
    q, k, _ = net.project(x)
    expected = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    torch.testing.assert_close(seen[0].dense(), expected.detach())


def test_methods_of_two_threads_at_once_are_not_mixed():
    net, both = Methods(), threading.Barrier(2, timeout=WAIT)
    inputs = sequence(5, seed=1), sequence(7, seed=2)

    def twice(x):
        net.fused(x)
        both.wait()
        net.written_out(x)

    with regard.record(net) as seen:
        in_threads(*(without_grad(twice, x) for x in inputs))
    assert seen.refused == []
    assert sorted(layer.shape[-1] for one in seen.passes for layer in one.layers) == [5, 5, 7, 7]


def test_a_function_that_is_no_method_of_the_model_is_not_recorded():
    net, other, x = Methods(), Methods(), sequence(5)
    with regard.record(net) as seen:
        in_threads(without_grad(other.fused, x), without_grad(lambda: (x @ x.mT).softmax(-1) @ x))
    assert seen.refused == []
    assert seen.passes == []


def test_a_method_that_outlives_the_block_is_named():
    inside, ended = threading.Event(), threading.Event()

    class Waits(Methods):
        def slow(self, x):
            self.fused(x)
            inside.set()
            assert ended.wait(WAIT)

    net = Waits()
    thread = threading.Thread(target=net.slow, args=(sequence(5),))
    recording = regard.record(net)
    seen = recording.__enter__()
    thread.start()
    assert inside.wait(WAIT)
    with pytest.warns(RefusedWarning, match="another thread.*join"):
        recording.__exit__(None, None, None)
    ended.set()
    thread.join(WAIT)
    assert seen.passes == []


def test_a_worker_that_waits_for_work_is_no_running_model():
    net, ended = Methods(), threading.Event()
    done = threading.Event()

    def worker(model, x):
        model.fused(x)
        done.set()
        assert ended.wait(WAIT)

    thread = threading.Thread(target=worker, args=(net, sequence(5)))
    with regard.record(net) as seen:
        thread.start()
        assert done.wait(WAIT)
    ended.set()
    thread.join(WAIT)
    assert seen.refused == []
    assert len(seen.layers) == 1


def test_profilers_and_pools_are_as_before():
    submit, calls = ThreadPoolExecutor.submit, []

    def profiler(frame, event, arg):
        calls.append(event)

    threading.setprofile(profiler)
    try:
        with regard.record(Methods()):
            in_a_thread(int)
        assert threading.getprofile() is profiler
    finally:
        threading.setprofile(None)
    assert calls
    with regard.record(Methods()), regard.record(Methods()):
        assert threading.getprofile() is not None
    assert threading.getprofile() is None
    assert ThreadPoolExecutor.submit is submit


def test_a_wrapper_of_submit_that_came_meanwhile_stays(monkeypatch):
    monkeypatch.setattr(ThreadPoolExecutor, "submit", ThreadPoolExecutor.submit)
    calls = []
    with regard.record(Methods()):
        inner = ThreadPoolExecutor.submit

        @functools.wraps(inner)
        def wrapper(pool, fn, /, *args, **kwargs):
            calls.append(fn)
            return inner(pool, fn, *args, **kwargs)

        ThreadPoolExecutor.submit = wrapper
    assert ThreadPoolExecutor.submit is wrapper
    for _ in range(2):
        with regard.record(Methods()), ThreadPoolExecutor(1) as pool:
            assert pool.submit(int).result(WAIT) == 0
        assert ThreadPoolExecutor.submit is wrapper
    assert len(calls) == 2


def test_a_recording_that_is_freed_while_another_begins_does_not_block():
    """Freeing it may come in between, wherever memory is allocated."""
    done = threading.Event()

    def work():
        with other_threads._lock:
            recording = regard.record(Methods())
            recording.__enter__()
            del recording
            gc.collect()
        done.set()

    threading.Thread(target=work, daemon=True).start()
    assert done.wait(WAIT)


def test_the_fast_path_of_one_layer_is_recorded_in_another_thread():
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), sequence(5)
    with torch.no_grad():
        expected = layer(x)
    with regard.record(layer) as seen:
        (y,) = in_threads(without_grad(layer, x))
    assert torch.equal(y, expected)
    assert [entry.name for entry in seen.layers] == ["self_attn"]


def test_recording_none_records_its_own_thread_alone():
    net, x = model(layers=1), sequence(5)
    with torch.no_grad(), regard.record(None) as seen:
        in_threads(without_grad(net, x))
        net(x)
    assert len(seen.passes) == 1


def test_another_model_of_another_thread_is_not_recorded():
    net, other, x = model(), model(), sequence(5)
    with regard.record(net) as seen:
        in_threads(without_grad(other, x), without_grad(net, x))
    assert len(seen.passes) == 1


def test_a_thread_with_a_recording_of_its_own_is_not_recorded_twice():
    net, x = model(), sequence(5)

    def work():
        with regard.record(net) as own:
            net(x)
        return len(own)

    with regard.record(net) as seen:
        assert in_threads(work) == [3]
    assert seen.refused == []
    assert seen.passes == []


def test_a_thread_that_records_another_model_is_recorded():
    net, other, x = model(), model(), sequence(5)

    def work():
        with regard.record(other) as own:
            net(x), other(x)
        return len(own.passes)

    with regard.record(net) as seen:
        assert in_threads(work) == [1]
    assert len(seen.passes) == 1


def test_two_blocks_hear_one_thread():
    net, x = model(), sequence(5)
    with regard.record(net) as outer, regard.record(net) as inner:
        in_threads(without_grad(net, x))
    assert len(outer.passes) == len(inner.passes) == 1


def test_an_exception_in_another_thread_leaves_nothing_on():
    net = nn.Sequential(Attention(), Call(lambda: 1 // 0), Attention())
    x = sequence(5)

    def work():
        with pytest.raises(ZeroDivisionError):
            net(x)

    def left():
        x @ x.mT  # a thread that is older than the end of the block notices it at its next operator
        return tap.listeners(), torch._C._dispatch_tls_is_dispatch_key_included(tap._key(tap.RECORD_KEY))

    with ThreadPoolExecutor(1) as older, ThreadPoolExecutor(1) as newer:
        older.submit(int).result(WAIT)
        with regard.record(net) as seen:
            newer.submit(work).result(WAIT)
        assert newer.submit(left).result(WAIT) == older.submit(left).result(WAIT) == ([], False)
    assert [layer.name for layer in seen.layers] == ["0"]


# Two threads at once.


@pytest.mark.parametrize("kind", [Attention, Eager])
def test_two_threads_in_the_middle_of_one_model_at_once(kind):
    both = threading.Barrier(2, timeout=WAIT)
    net = nn.Sequential(kind(), Call(both.wait), kind()).eval()
    inputs = sequence(5, seed=1), sequence(7, seed=2)
    with regard.record(net) as seen:
        in_threads(*(without_grad(net, x) for x in inputs))
    assert seen.refused == []
    net[1].function = lambda: None
    passes = sorted(seen.passes, key=lambda one: one.layers[0].shape[-1])
    for one, x in zip(passes, inputs, strict=True):
        assert_right(one.layers, net, x)


def test_two_threads_between_softmax_and_values_at_once():
    both = threading.Barrier(2, timeout=WAIT)
    net = model(Eager)
    inputs = sequence(5, seed=1), sequence(5, seed=2)
    net[1].between = both.wait
    with regard.record(net) as seen:
        in_threads(*(without_grad(net, x) for x in inputs))
    net[1].between = lambda: None
    assert seen.refused == []
    first = net[0].weights(inputs[0]).detach()
    passes = sorted(seen.passes, key=lambda one: float((one.layers[0].weights.dense() - first).abs().max()))
    for one, x in zip(passes, inputs, strict=True):
        assert_right(one.layers, net, x)


def test_the_thread_of_the_block_and_another_at_once():
    both = threading.Barrier(2, timeout=WAIT)
    net = nn.Sequential(Attention(), Call(both.wait), Attention()).eval()
    inputs = sequence(5, seed=1), sequence(7, seed=2)
    with torch.no_grad(), regard.record(net) as seen, ThreadPoolExecutor(1) as pool:
        other = pool.submit(without_grad(net, inputs[1]))
        net(inputs[0])
        other.result(WAIT)
    net[1].function = lambda: None
    passes = sorted(seen.passes, key=lambda one: one.layers[0].shape[-1])
    for one, x in zip(passes, inputs, strict=True):
        assert_right(one.layers, net, x)


def test_a_thread_that_outlives_the_block_is_named_and_left_alone():
    inside, ended = threading.Event(), threading.Event()

    def wait():
        inside.set()
        assert ended.wait(WAIT)

    net = nn.Sequential(Attention(), Call(wait), Attention()).eval()
    x, state = sequence(5), {}

    def work():
        without_grad(net, x)()
        state["left"] = tap.listeners(), torch._C._dispatch_tls_is_dispatch_key_included(tap._key(tap.RECORD_KEY))

    thread = threading.Thread(target=work)
    recording = regard.record(net)
    seen = recording.__enter__()
    thread.start()
    assert inside.wait(WAIT)
    with pytest.warns(RefusedWarning, match="another thread.*join"):
        recording.__exit__(None, None, None)
    ended.set()
    thread.join(WAIT)
    assert seen.passes == []
    assert state["left"] == ([], False)


# Watching.


def test_watch_looks_at_another_thread():
    net, x = model().train(), sequence(5)
    with regard.watch(net, every=1) as watching:
        in_threads(lambda: net(x))
    expected = regard.Weights.from_dense(net[0].weights(x)).entropy().mean((0, 2)) / torch.tensor(5.0).log()
    torch.testing.assert_close(watching.layers["0"]["entropy_share"], expected.detach())


def test_watch_does_not_mix_two_threads_that_train_at_once():
    both = threading.Barrier(2, timeout=WAIT)
    net = nn.Sequential(Attention(), Call(both.wait), Attention()).train()
    inputs = sequence(5, seed=1), sequence(7, seed=2)
    with regard.watch(net, every=1) as watching:
        in_threads(*(lambda x=x: net(x) for x in inputs))
    assert [step for step, _ in watching.history] == [0, 1]
    net[1].function = lambda: None
    expected = []
    for x in inputs:
        with regard.watch(net, every=1) as alone:
            net(x)
        expected.append(alone.numbers())
    looks = [numbers for _, numbers in watching.history]
    assert any(
        all(one == pytest.approx(other) for one, other in zip(looks, order, strict=True))
        for order in (expected, expected[::-1])
    )


# Generation.


@pytest.fixture
def llama():
    transformers = pytest.importorskip("transformers")
    from support import zoo

    torch.manual_seed(0)
    config = {**zoo.DECODER, "eos_token_id": None}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()


class Tokenizer:
    def decode(self, ids, **_):
        return " ".join(str(int(n)) for n in ids)


def prompt(length, seed):
    return torch.randint(3, 99, (1, length), generator=torch.Generator().manual_seed(seed))


def assert_generated(one, net, ids, steps):
    """A pass is the generation of these steps after the prompt, as one causal matrix."""
    with torch.no_grad(), regard.record(net) as seen:
        net.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, do_sample=False)
    assert one.steps == steps
    for layer, expected in zip(one.layers, seen.layers, strict=True):
        torch.testing.assert_close(layer.weights.dense(), expected.weights.dense())


def test_streamed_generation_is_recorded(llama):
    transformers = pytest.importorskip("transformers")
    ids = prompt(6, seed=1)
    streamer = transformers.TextIteratorStreamer(Tokenizer(), timeout=WAIT)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False, "streamer": streamer}
    with regard.record(llama) as seen:
        thread = threading.Thread(target=llama.generate, args=(ids,), kwargs=options)
        thread.start()
        assert len("".join(streamer).split()) > 5
        thread.join(WAIT)
    assert seen.refused == []
    assert len(seen.passes) == 1
    assert_generated(seen.passes[0], llama, ids, 5)


def test_two_generations_at_once_are_two_passes(llama):
    transformers = pytest.importorskip("transformers")
    both = threading.Barrier(2, timeout=WAIT)

    class Wait(transformers.StoppingCriteria):
        def __call__(self, ids, scores, **_):
            both.wait()
            return torch.zeros(ids.shape[0], dtype=torch.bool)

    prompts = prompt(6, seed=1), prompt(6, seed=2)
    options = {"max_new_tokens": 4, "do_sample": False, "stopping_criteria": [Wait()]}
    with regard.record(llama) as seen:
        in_threads(
            *(lambda ids=ids: llama.generate(ids, attention_mask=torch.ones_like(ids), **options) for ids in prompts)
        )
    assert seen.refused == []
    assert [one.steps for one in seen.passes] == [4, 4]
    first = llama_weights(llama, prompts[0])
    passes = sorted(
        seen.passes, key=lambda one: float((one.layers[0].weights.dense()[..., :6, :6] - first).abs().max())
    )
    for one, ids in zip(passes, prompts, strict=True):
        assert_generated(one, llama, ids, 4)


def llama_weights(net, ids):
    with torch.no_grad(), regard.record(net) as seen:
        net(ids)
    return seen[0].dense()


def test_a_generation_with_a_thread_for_each_step_is_one_pass(llama):
    ids, state = prompt(6, seed=1), {"cache": None}

    def step(new):
        out = llama(new, past_key_values=state["cache"], use_cache=True)
        state["cache"] = out.past_key_values
        return out.logits[:, -1:].argmax(-1)

    with regard.record(llama) as seen:
        new = ids
        for _ in range(4):
            (new,) = in_threads(without_grad(step, new))
    assert len(seen.passes) == 1
    assert_generated(seen.passes[0], llama, ids, 4)


def test_an_encoder_and_a_decoder_that_generate_in_another_thread():
    transformers = pytest.importorskip("transformers")
    from support import zoo

    torch.manual_seed(0)
    net = transformers.BartForConditionalGeneration(transformers.BartConfig(**zoo.SEQ2SEQ)).eval()
    ids = prompt(6, seed=1)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False, "num_beams": 1}
    with regard.record(net) as seen:
        in_threads(without_grad(lambda: net.generate(ids, **options)))
    with torch.no_grad(), regard.record(net) as here:
        net.generate(ids, **options)
    assert seen.refused == here.refused
    assert [(layer.name, layer.shape) for layer in seen.layers] == [(layer.name, layer.shape) for layer in here.layers]
    assert any("encoder" in layer.name for layer in seen.layers)
    for one, other in zip(seen.layers, here.layers, strict=True):
        torch.testing.assert_close(one.weights.dense(), other.weights.dense())

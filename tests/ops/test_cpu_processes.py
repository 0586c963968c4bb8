"""The fused CPU backend among processes, threads and caches: forked, spawned, at once, read-only, damaged."""

import os
import shutil
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from headcode.bench.ops import Shape, peak_memory
from headcode.ops import hyper_attention


def compute(seed):
    """Output and gradients of one call, from a seed."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(8, 4, 40, 4, generator=generator, requires_grad=True) for _ in range(3))
    out = hyper_attention(q, k, v, backend="cpu")
    return torch.stack([out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))])


class Computed(Dataset):
    """Runs the kernel in whatever process asks for an item."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return compute(index), torch.get_num_threads()


def check_loader(context):
    expected = [compute(seed) for seed in range(6)]
    loader = DataLoader(Computed(), batch_size=None, num_workers=2, multiprocessing_context=context, timeout=300)
    for (actual, num_threads), wanted in zip(loader, expected, strict=True):
        assert torch.equal(actual, wanted)
        assert num_threads == 1
    # And the parent goes on.
    assert torch.equal(compute(0), expected[0])


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_workers_after_the_parent_used_its_threads(two_threads):
    check_loader("fork")


@pytest.mark.slow
def test_spawned_workers(two_threads):
    check_loader("spawn")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_may_use_threads_again(two_threads):
    expected = compute(1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            # torch's own pool does not survive a fork: only the kernel may use threads here.
            q = torch.zeros(16, 4, 64, 4)
            hyper_attention(q, q, q, backend="cpu")
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(compute(1), expected)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_several_python_threads_at_once(num_threads):
    expected = [compute(seed) for seed in range(8)]
    start = threading.Barrier(4)

    def work(first):
        torch.set_num_threads(num_threads)
        start.wait(60)
        return all(torch.equal(compute(seed), expected[seed]) for _ in range(5) for seed in range(first, 8, 4))

    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(4)))
    finally:
        torch.set_num_threads(before)


def run_script(code, *arguments, **environment):
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done


ONE_CALL = """
    import torch, warnings
    warnings.simplefilter("error")
    from headcode.ops import hyper_attention
    q = torch.arange(60.0).view(1, 3, 5, 4).sin()
    print(hyper_attention(q, q, q, backend="cpu").double().sum().item())
    from headcode.ops.cpu.attention_forward import KERNELS
    (kernel,) = KERNELS.made.values()
    stats = kernel.stats
    print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


CALLS = """
    import sys, torch
    from headcode.ops import hyper_attention
    q = torch.arange(60.0).view(1, 3, 5, 4).sin()
    for norm in sys.argv[1:]:
        out, wanted = (hyper_attention(q, q, q, norm=norm, backend=backend) for backend in ("cpu", "reference"))
        torch.testing.assert_close(out, wanted)
"""


@pytest.mark.slow
def test_kernels_that_two_processes_have_compiled_are_told_apart_by_a_third(tmp_path):
    """Each is the first of its process, and Numba numbers the names of symbols within a process."""
    for norms in (["none"], ["rms_head"], ["none", "rms_head"]):
        run_script(CALLS, *norms, HEADCODE_CACHE_DIR=str(tmp_path / "cache"))


@pytest.mark.slow
def test_the_cache_is_used_and_a_bad_one_only_costs_time(tmp_path):
    cold = run_script(ONE_CALL, HEADCODE_CACHE_DIR=str(tmp_path / "cache"))
    warm = run_script(ONE_CALL, HEADCODE_CACHE_DIR=str(tmp_path / "cache"))
    result, compiled = cold.stdout.splitlines()
    assert compiled == "0 1"
    assert warm.stdout.splitlines() == [result, "1 0"]
    assert cold.stderr == warm.stderr == ""

    for path in (tmp_path / "cache").rglob("*.nbc"):
        path.write_bytes(b"not what Numba wrote")
    assert run_script(ONE_CALL, HEADCODE_CACHE_DIR=str(tmp_path / "cache")).stdout.splitlines()[0] == result

    (tmp_path / "file").write_text("in the way of a folder")
    missing = run_script(ONE_CALL, HEADCODE_CACHE_DIR=str(tmp_path / "file" / "below"))
    assert missing.stdout.splitlines()[0] == result and missing.stderr == ""


@pytest.fixture
def read_only(tmp_path):
    """A folder that nobody may write to: for root, who may write everywhere, a file system mounted read-only."""
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o500)
    mounted = False
    if os.access(folder, os.W_OK):
        command = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(folder)]
        mounted = shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0
        if not mounted:
            pytest.skip("this user may write everywhere and may not mount")
    yield folder
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)
    folder.chmod(0o700)


@pytest.mark.slow
def test_a_read_only_cache_folder(read_only):
    done = run_script(ONE_CALL, HEADCODE_CACHE_DIR=str(read_only))
    assert done.stdout.splitlines()[1] == "0 1"  # compiled, and not found in a cache
    assert done.stderr == "" and list(read_only.iterdir()) == []


@pytest.mark.slow
def test_exit_is_quick_and_quiet_after_threads_were_used():
    done = run_script(
        """
        import threading, torch
        torch.set_num_threads(2)
        from headcode.ops import hyper_attention
        q = torch.randn(16, 4, 64, 4)
        hyper_attention(q, q, q, backend="cpu")
        threading.Thread(target=lambda: [hyper_attention(q, q, q, backend="cpu") for _ in range(20)]).start()
        print("leaving")
        """
    )
    assert done.stdout == "leaving\n" and done.stderr == ""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's high-water mark of memory")
@pytest.mark.parametrize("method", ["hyla", "softmax", "softmax_hyla", "linear_rms"])
def test_64_megabytes_are_enough_at_4096(method, two_threads):
    megabytes = peak_memory(Shape(1, 16, 4096, 8), method, "cpu")
    # Output and gradients alone are 8.4 MB; a single Tq×Tk matrix per head would be 1074 MB.
    assert 8 < megabytes < 64

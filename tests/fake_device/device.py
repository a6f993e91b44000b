"""A GPU in host memory, as torch's device "fakegpu": device.cpp, and the module torch.fakegpu with
CUDA's functions.

A process that has registered it keeps it for good, so tests do that in processes of their own
(`tests.support.ranks`).
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import types
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "fakegpu"
SOURCE = Path(__file__).with_name("device.cpp")


def build() -> Path:
    """The compiled library, in the user's cache folder: from an earlier session, or made now, which
    takes ten seconds."""
    made_of = SOURCE.read_bytes() + f"{torch.__version__} {sys.version}".encode()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "g2rpo-fake-device"
    library = home / f"{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if not library.is_file():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as folder:
            os.replace(_compiled(Path(folder)), library)
    return library


def _compiled(folder: Path) -> Path:
    """torch.utils.cpp_extension does the same, but imports torch once more to do it."""
    installed = Path(torch.__file__).parent
    header = (installed / "include/ATen/autocast_mode.h").read_text()
    lists = re.findall(r"#define AT_FORALL_\w+\(_\)(?:.*\\\n)*.*\n", header)
    (folder / "autocast_lists.h").write_text("".join(lists))
    library = folder / "fake_device.so"
    kind = ["-std=c++20", "-O0", "-fPIC", "-shared"]
    includes = [f"-I{folder}", f"-I{installed / 'include'}"]
    libraries = [f"-L{installed / 'lib'}", "-ltorch_cpu", "-lc10"]
    command = ["g++", *kind, *includes, str(SOURCE), "-o", str(library), *libraries]
    subprocess.run(command, check=True)
    return library


def register(library: Path) -> None:
    """Makes "fakegpu" a device of this process, in which nothing is compiled: it has no compiler's
    backend."""
    torch._dynamo.config.disable = True
    torch.ops.load_library(str(library))
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, Module(f"torch.{NAME}"))
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_storage=True
    )
    dist.Backend.default_device_backend_map[NAME] = "gloo"


class Module(types.ModuleType):
    """torch.cuda's functions for the fake device, as far as torch, its libraries and g2rpo ask."""

    CAPACITY = 2**28
    """Bytes of a device, as far as `mem_get_info` knows; what it refuses to exceed is set by
    `limit`."""
    _initialized = True

    def is_available(self):
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self):
        return False

    def device_count(self):
        return torch.ops.fake_device.device_count()

    def current_device(self):
        return torch.ops.fake_device.current_device()

    def set_device(self, index):
        torch.ops.fake_device.set_device(_index(index))

    @contextmanager
    def device(self, index):
        before = self.current_device()
        self.set_device(index)
        try:
            yield
        finally:
            self.set_device(before)

    def get_device_name(self, device=None):
        return "a fake GPU"

    def manual_seed_all(self, seed):
        pass

    manual_seed = manual_seed_all

    def get_rng_state(self, device=None):
        """As on CUDA this would begin to use the device, and a rank has no business on
        another's."""
        if _index(device) != self.current_device():
            raise RuntimeError(
                f"the generator of fakegpu:{_index(device)} is asked by who works on {self.current_device()}"
            )
        return torch.get_rng_state()

    def set_rng_state(self, state, device=None):
        pass

    def costs(self):
        """How often this thread has waited for a device, and has copied something to one."""
        return torch.tensor([torch.ops.fake_device.waits(), torch.ops.fake_device.uploads()])

    def synchronize(self, device=None):
        pass

    def empty_cache(self):
        pass

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def memory_allocated(self, device=None):
        return torch.ops.fake_device.allocated(_index(device))

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device=None):
        return torch.ops.fake_device.peak(_index(device))

    def reset_peak_memory_stats(self, device=None):
        torch.ops.fake_device.reset_peak(_index(device))

    def mem_get_info(self, device=None):
        return self.CAPACITY - self.memory_allocated(device), self.CAPACITY

    def limit(self, size, device=None):
        """From now on at most `size` bytes are there; 0: as many as the host has."""
        torch.ops.fake_device.limit(_index(device), size)


class Apple(Module):
    """The same without what torch.mps lacks: no memory statistics, names and current device to
    choose."""

    def device_count(self):
        return 1

    def __getattribute__(self, name):
        asked_by = sys._getframe(1).f_globals.get("__name__", "")
        if (
            asked_by.startswith("g2rpo.")
            and not name.startswith("_")
            and not hasattr(torch.mps, name)
        ):
            raise AttributeError(f"torch.mps has no {name}")
        return super().__getattribute__(name)


class OwnFloat64(TorchDispatchMode):
    """Refuses tensors of float64 on the device that this package makes; diffusers knows Apple's
    devices by name."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if (
            isinstance(made, torch.Tensor)
            and made.dtype == torch.float64
            and made.device.type == NAME
        ):
            frame = sys._getframe(1)
            while f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
                frame = frame.f_back
            assert f"{os.sep}g2rpo{os.sep}" not in frame.f_code.co_filename, (
                f"{func}: float64 on the device"
            )
        return made


def _index(device) -> int:
    index = (
        device
        if isinstance(device, int)
        else None
        if device is None
        else torch.device(device).index
    )
    return torch.ops.fake_device.current_device() if index is None else index

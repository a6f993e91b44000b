"""Mistakes that a CPU forgives and CUDA does not. Each is a function that fails on the fake device;
`MENDED` does not."""

import threading

import torch
from torch.nn import functional as F

from g2rpo.core.devices import same_device


def zeros(*shape):
    return torch.zeros(*shape, device="fakegpu")


def in_thread(initializer):
    """Sums a tensor of this thread's device and one that another thread puts on "fakegpu"."""
    made = []

    def work():
        initializer()
        made.append(zeros(3))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return zeros(3) + made[0]


def written_and_read(folder, **options):
    """A tensor that rank 0 saved, on the device of rank 1."""
    torch.fakegpu.set_device(0)
    torch.save(zeros(3), folder / "state.pt")
    torch.fakegpu.set_device(1)
    return zeros(3).copy_(torch.load(folder / "state.pt", **options))


def norms(device, dtype=None):
    """Puts normed rows, whose dtype is not said, among others of bfloat16."""
    rows, some = torch.ones(4, 8, dtype=torch.bfloat16, device=device), torch.tensor([1, 2])
    with torch.autocast(device, torch.bfloat16):
        rows[some] = F.layer_norm(rows[some], (8,)).to(dtype)
    return rows


def free(call):
    """Raises RuntimeError if a call with a tensor of the device waits for it or copies something to
    it."""
    x = zeros(3)
    before = torch.fakegpu.costs()
    call(x)
    waits, copies = (torch.fakegpu.costs() - before).tolist()
    if waits or copies:
        raise RuntimeError(f"{waits} waits, {copies} copies to the device")


FAULTS = {
    "a sum of two devices": lambda folder: zeros(3) + torch.zeros(3),
    "a row of two devices": lambda folder: torch.cat([zeros(3), torch.zeros(3)]),
    "a stack with a number on the CPU": lambda folder: torch.stack([zeros(()), torch.zeros(())]),
    "a layer with weights on the CPU": lambda folder: F.linear(zeros(1, 3), torch.zeros(2, 3)),
    "a convolution with weights on the CPU": lambda folder: F.conv2d(
        zeros(1, 3, 4, 4), torch.zeros(2, 3, 1, 1)
    ),
    "a norm with weights on the CPU": lambda folder: F.rms_norm(zeros(1, 3), (3,), torch.ones(3)),
    "attention to keys on the CPU": lambda folder: F.scaled_dot_product_attention(
        zeros(1, 2, 4, 8), *[torch.zeros(1, 2, 4, 8)] * 2
    ),
    "a CPU tensor indexed by the device": lambda folder: torch.zeros(3)[zeros(1).long()],
    "NumPy": lambda folder: zeros(3).numpy(),
    "a generator of the CPU": lambda folder: torch.randn(
        3, generator=torch.Generator(), device="fakegpu"
    ),
    "a copy to another rank's device": lambda folder: zeros(3).to("fakegpu:1"),
    "generators of all devices": lambda folder: torch.random.fork_rng().__enter__(),
    "a thread on another device": lambda folder: (
        torch.fakegpu.set_device(1) or in_thread(lambda: None)
    ),
    "a checkpoint on another rank's device": written_and_read,
    "bfloat16 expected of a norm under autocast": lambda folder: norms("fakegpu"),
    "rows in float64": lambda folder: zeros(4, 16, 64).double(),
    "a number read": lambda folder: free(lambda x: float(x.sum())),
    "a condition": lambda folder: free(lambda x: x.sum() and None),
    "a mask": lambda folder: free(lambda x: x[x == 0]),
    "a masked assignment of rows": lambda folder: free(lambda x: x.__setitem__(x == 0, zeros(3))),
    "a copy to the host": lambda folder: free(lambda x: x.cpu()),
    "a copy from the host": lambda folder: free(lambda x: x + torch.ones(3).to(x)),
    "a tensor of numbers": lambda folder: free(lambda x: x + torch.tensor([1.0], device="fakegpu")),
}
MENDED = {
    "numbers": lambda folder: (zeros(3) + 1.0) * torch.tensor(2.0),
    "a conjugate": lambda folder: torch.view_as_complex(zeros(3, 2)).conj() * 2,
    "a CPU index": lambda folder: zeros(3)[torch.tensor([0, 2])],
    "a generator of the CPU": lambda folder: torch.randn(3, generator=torch.Generator()).to(
        "fakegpu"
    ),
    "own generators": lambda folder: torch.random.fork_rng(devices=[]).__enter__(),
    "a thread on the same device": lambda folder: (
        torch.fakegpu.set_device(1) or in_thread(same_device(torch.device("fakegpu")))
    ),
    "a checkpoint on the CPU": lambda folder: written_and_read(folder, map_location="cpu"),
    "a norm's dtype is said": lambda folder: norms("fakegpu", torch.bfloat16),
    "a CPU's norms under autocast": lambda folder: norms("cpu"),
    "positions in float64": lambda folder: torch.outer(zeros(28).double(), zeros(8).double()),
    "what stays on the device": lambda folder: free(
        lambda x: torch.where(x == 0, x, F.rms_norm(x, (3,)) + 1)[1:].clone()
    ),
}


def outcomes(world, folder):
    """What each of them raises, by name; None where nothing is raised."""
    found = {}
    for name, run in [*FAULTS.items(), *((f"mended: {name}", run) for name, run in MENDED.items())]:
        torch.fakegpu.set_device(0)
        try:
            run(folder)
            found[name] = None
        except (RuntimeError, TypeError, IndexError) as error:
            found[name] = str(error).splitlines()[0]
    return found


def autocast_dtypes(world, folder):
    """The dtype of a result under bfloat16 autocast of bfloat16 numbers, by operation."""
    x = torch.ones(2, 4, 8, dtype=torch.bfloat16)
    operations = {
        "linear": lambda x: F.linear(x.float(), x[0].float()),
        "matmul": lambda x: x.float() @ x.float().transpose(1, 2),
        "attention": lambda x: F.scaled_dot_product_attention(x.float(), x, x),
        "layer_norm": lambda x: F.layer_norm(x, (8,)),
        "rms_norm": lambda x: F.rms_norm(x, (8,)),
        "group_norm": lambda x: F.group_norm(x, 2),
        "pow": lambda x: x.pow(2),
        "exp": lambda x: x.exp(),
        "softmax": lambda x: x.softmax(-1),
        "sum": lambda x: x.sum(),
        "gelu": lambda x: F.gelu(x),
        "mul": lambda x: x * x,
        "add": lambda x: x + x.float(),
    }
    found = {}
    for device in ("fakegpu", "cpu"):
        with torch.autocast(device, torch.bfloat16):
            found[device] = {
                name: str(run(x.to(device)).dtype).removeprefix("torch.")
                for name, run in operations.items()
            }
    return found

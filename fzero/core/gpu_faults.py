"""Why a GPU cannot be used, as PyTorch and CUDA say it at its first use: one line of their many, and what to do."""

from __future__ import annotations

import re
from collections.abc import Sequence

# What to do, by what is said; the last one is for all the rest.
ADVICE = {
    r"driver .*too old|insufficient for CUDA": "install a newer driver, or PyTorch for an older CUDA "
    "(https://pytorch.org/get-started/previous-versions)",
    r"no kernel image|compiled for": "install a PyTorch that was compiled for it "
    "(https://pytorch.org/get-started/previous-versions)",
    r"busy or unavailable": "another process has it alone: nvidia-smi shows which, and the GPU's compute mode",
    r"out of memory": "other processes hold its memory: nvidia-smi shows which",
    r"not yet initialized": "start the service that connects the GPUs (systemctl start nvidia-fabricmanager)",
    r"unsupported display driver|version mismatch": "the driver and its libraries are of different versions: restart "
    "the machine, or the container with the libraries of its host",
    r"": "nvidia-smi shows more",
}


def gist_of(text: str) -> str:
    """What a message of PyTorch about CUDA says: CUDA's own error if it names one, else its first sentence.

    >>> gist_of("CUDA error: no kernel image is available for execution on the device\\nSearch for ...")
    'no kernel image is available for execution on the device'
    """
    text = re.sub(r"\(Triggered internally.*", "", text, flags=re.DOTALL).strip()
    numbered = re.search(r"Error \d+: (.+)", text)
    first = (numbered[1] if numbered else text).partition("\n")[0]
    first = re.sub(
        r"^(CUDA call failed lazily at initialization with error|CUDA initialization|CUDA error): ", "", first
    )
    return re.split(r"\. (?=[A-Z])", first)[0].rstrip(". ")


def advice_on(gist: str) -> str:
    """What to do about what `gist_of` found, and how to train without a GPU."""
    found = next(advice for said, advice in ADVICE.items() if re.search(said, gist, re.IGNORECASE))
    return f"{found}; device=cpu (--device cpu) trains without it"


def is_compiled_for(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether code for `architectures`, such as sm_90 and compute_120, runs on a GPU of a compute capability.

    Machine code (sm) runs on later GPUs of the same generation, that of sm_90a on its own alone; an intermediate
    code (compute) is compiled for any later one. Ref: NVIDIA, CUDA C++ Programming Guide, "Binary Compatibility".

    >>> is_compiled_for((8, 9), ["sm_80", "sm_90"]), is_compiled_for((7, 0), ["sm_75", "sm_80"])
    (True, False)
    """
    for name in architectures:
        form = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)
        if form is None:
            return True  # of a kind that this function does not know
        has = int(form[2]), int(form[3])
        if form[4] == "a":
            runs = capability == has
        elif form[1] == "compute":
            runs = capability >= has
        else:
            runs = capability[0] == has[0] and capability >= has
        if runs:
            return True
    return not architectures

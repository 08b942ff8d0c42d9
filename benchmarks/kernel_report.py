"""python benchmarks/kernel_report.py [--arch sm_90] [--all]

What the compiler makes of the CUDA kernels, on a machine without a GPU: NVRTC compiles them, nvdisasm shows the machine
code. One line for each instance:

    regs, spills   registers of a thread; bytes that did not fit them
    warps          of a multiprocessor at once, as registers and threads allow; of at most 64 (48 on sm_86 and sm_89)
    flight         KiB of logits that a multiprocessor can have asked for at once: warps x 32 lanes x 4 x 16 bytes
    LDG, STG       loads and stores of logits by 16 bytes in the inner loop, and of any other width
    instr, MUFU    issued instructions, and those of the unit for exponentials, a logit of the inner loop

The inner loop of a forward is the loop that loads a lane's vectors; a second read has none, there it is the straight
code of a block that is full, from the first load of a logit to the last store. Needs CuPy, NVRTC and
nvidia-cuda-nvdisasm, which the test extra has.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cupy_coll.device import Kernel

TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100")
TYPES = {"Bf16": 2, "Half": 2, "Float": 4}
WIDTHS = (16, 8, 4, 2, 0)
VECTORS, LANES, VECTOR_BYTES = 4, 32, 16
REGISTERS, REGISTER_UNIT = 65_536, 256  # of a multiprocessor; what a warp gets is a multiple of the unit

# Of an H200: 132 multiprocessors at 1.98 GHz, which issue 4 x 32 thread instructions a cycle, 16 of them MUFU; a copy
# moves 4.3 TB/s, counted as bytes read and written.
CLOCKS, COPY = 132 * 1.98e9, 4.3e12
ISSUE, EXPONENTIALS = 128, 16


def budget(bytes_of_a_logit: float) -> tuple[float, float]:
    """(instructions, MUFU) that an H200 issues in the time in which memory moves a logit's bytes."""
    cycles = CLOCKS * bytes_of_a_logit / COPY  # x multiprocessors
    return ISSUE * cycles, EXPONENTIALS * cycles


@dataclass
class Facts:
    """Of one instance for one target."""

    kernel: Kernel
    target: str
    registers: int
    spills: int
    stack: int
    threads: int
    bytes_of_a_logit: int  # read and written
    loads: dict[int, int]  # in the inner loop, by bytes
    stores: dict[int, int]
    instructions: float  # a logit
    exponentials: float

    @property
    def warps(self) -> int:
        """Of a multiprocessor at once."""
        of_block = self.threads // LANES
        most = {"sm_75": 32, "sm_86": 48, "sm_89": 48}.get(self.target, 64)
        registers = -(-self.registers * LANES // REGISTER_UNIT) * REGISTER_UNIT
        return min(REGISTERS // (registers * of_block), most // of_block) * of_block

    @property
    def in_flight(self) -> int:
        """Bytes of logits that a multiprocessor can have asked for."""
        return self.warps * LANES * VECTORS * VECTOR_BYTES


def instances(widths: Iterable[int] = (16,)) -> list[Kernel]:
    """All of these widths; log_softmax with results of the logits' type and of float32."""
    kernels = [Kernel("merge_partials", entropy) for entropy in ("false", "true")]
    for width in widths:
        for name in TYPES:
            for entropy in ("false", "true"):
                kernels.append(Kernel("softmax_partials", f"{name}, {width}, {entropy}"))
                kernels.append(Kernel("logprob_backward", f"{name}, {width}, {entropy}"))
            for result in sorted({name, "Float"}):
                kernels.append(Kernel("log_softmax", f"{name}, {width}, {result}, {width if width != 2 else 4}"))
    return [k for k in kernels if not re.search(r"Float, 2\b", k.arguments)]


def compile_for(target: str, kernels: Sequence[Kernel]) -> dict[Kernel, tuple[str, str, bytes]]:
    """NVRTC's work for kernels of one file: {kernel: (name in the machine code, the compiler's log, cubin)}."""
    from cupy.cuda import nvrtc

    (source,) = {kernel.source for kernel in kernels}
    program = nvrtc.createProgram(source, f"{kernels[0].name}.cu", (), ())
    for kernel in kernels:
        nvrtc.addNameExpression(program, kernel.expression)
    try:
        nvrtc.compileProgram(program, (*Kernel.OPTIONS, f"-arch={target}", "--ptxas-options=-v"))
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{kernels[0].name} for {target}: {nvrtc.getProgramLog(program)}") from error
    log, cubin = nvrtc.getProgramLog(program), nvrtc.getCUBIN(program) + b"\0"  # the binding drops a last byte
    found = {kernel: (nvrtc.getLoweredName(program, kernel.expression), log, cubin) for kernel in kernels}
    nvrtc.destroyProgram(program)
    return found


def resources_of(name: str, log: str) -> tuple[int, int, int]:
    """(registers, spilled bytes, bytes of stack) of an entry function, as ptxas says."""
    part = log.split(f"Compiling entry function '{name}'")[1].split("Compiling entry function")[0]
    stack, stores, loads = map(
        int, re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part).groups()
    )
    return int(re.search(r"Used (\d+) registers", part)[1]), stores + loads, stack


def find_nvdisasm() -> str | None:
    """The disassembler, of the wheel nvidia-cuda-nvdisasm or on PATH."""
    for package in ("nvidia.cu13", "nvidia.cuda_nvdisasm"):
        try:
            specification = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for place in () if specification is None else specification.submodule_search_locations or ():
            tool = Path(place, "bin", "nvdisasm")
            if tool.is_file():
                if not os.access(tool, os.X_OK):  # pip does not set it
                    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
                return str(tool)
    return shutil.which("nvdisasm")


def disassemble(cubin: bytes) -> dict[str, list[str]]:
    """{name: lines of machine code, with its labels} of each function."""
    tool = find_nvdisasm()
    if tool is None:
        raise RuntimeError("nvdisasm is missing (pip install nvidia-cuda-nvdisasm)")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, timeout=120, check=True)
    functions: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in done.stdout.splitlines():
        if begins := re.match(r"\.text\.(\w+):", line):
            lines = functions.setdefault(begins[1], [])
        elif label := re.match(r"(\.L_x_\w+):", line):
            lines.append(label[1])
        elif code := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            lines.append(code[1])
    return functions


def inner_part(lines: list[str]) -> list[str]:
    """The instructions of the shortest loop that loads a lane's vectors; without one those of a full block."""
    at = {line: i for i, line in enumerate(lines) if line.startswith(".L")}
    loops = []
    for i, line in enumerate(lines):
        target = re.search(r"\bBRA\b.*`\((\.L_x_\w+)\)", line)
        if target and at.get(target[1], i) < i:
            body = [one for one in lines[at[target[1]] : i + 1] if not one.startswith(".L")]
            loops.append(body)
    loops = [body for body in loops if widths_of(body, "LDG").get(16, 0) >= VECTORS]
    if loops:
        return min(loops, key=len)
    straight: list[list[str]] = [[]]  # code between labels and branches
    for line in lines:
        if line.startswith(".L") or re.search(r"\b(BRA|EXIT)\b", line):
            straight.append([])
        else:
            straight[-1].append(line)
    blocks = [one for one in straight if widths_of(one, "LDG").get(16, 0) >= VECTORS and widths_of(one, "STG").get(16)]
    if not blocks:
        return []
    block = min(blocks, key=len)
    memory = [i for i, line in enumerate(block) if re.search(r"\b(LDG|STG)\.E\.128", line)]
    return block[memory[0] : memory[-1] + 1]


def widths_of(lines: Iterable[str], operation: str) -> dict[int, int]:
    """{bytes: how many} of the global loads or stores among instructions."""
    found: dict[int, int] = {}
    for line in lines:
        if not re.search(rf"\b{operation}\b", line):
            continue
        name = re.search(rf"{operation}[.\w]*", line)[0]
        bits = re.search(r"\.(128|64|U16|S16|U8|S8)\b", name)
        width = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}[bits[1]] if bits else 4
        found[width] = found.get(width, 0) + 1
    return found


def facts_of(target: str, kernels: Sequence[Kernel]) -> list[Facts]:
    """Of instances of any files; those with WIDTH 16 also show their inner loop."""
    facts = []
    for name in dict.fromkeys(kernel.name for kernel in kernels):
        compiled = compile_for(target, [kernel for kernel in kernels if kernel.name == name])
        functions: dict[str, list[str]] = {}
        if find_nvdisasm():
            functions = disassemble(next(iter(compiled.values()))[2])
        for kernel, (lowered, log, _) in compiled.items():
            registers, spills, stack = resources_of(lowered, log)
            words = kernel.arguments.split(", ")
            size = TYPES.get(words[0], 4)
            inner = inner_part(functions.get(lowered, [])) if ", 16" in kernel.arguments else []
            logits = VECTORS * VECTOR_BYTES // size
            written = {"logprob_backward": size, "log_softmax": TYPES.get(words[2 % len(words)], 0)}.get(name, 0)
            facts.append(
                Facts(
                    kernel,
                    target,
                    registers,
                    spills,
                    stack,
                    128 if name == "merge_partials" else 256,
                    0 if name == "merge_partials" else size + written,
                    widths_of(inner, "LDG"),
                    widths_of(inner, "STG"),
                    sum("@!PT" not in one for one in inner) / logits,
                    sum("MUFU" in one for one in inner) / logits,
                )
            )
    return facts


def table(facts: Sequence[Facts]) -> list[str]:
    """Lines of Markdown."""
    columns = ("kernel", "regs", "spills", "warps", "flight KiB", "LDG 16 (other)", "STG 16 (other)")
    columns += ("instr (budget)", "MUFU (budget)")
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    for one in facts:
        instructions, exponentials = budget(one.bytes_of_a_logit)
        cells = [f"`{one.kernel.expression}`", one.registers, one.spills, one.warps]
        if one.instructions:
            others = [sum(n for width, n in found.items() if width != 16) for found in (one.loads, one.stores)]
            cells += [
                one.in_flight // 1024,
                f"{one.loads.get(16, 0)} ({others[0]})",
                f"{one.stores.get(16, 0)} ({others[1]})",
                f"{one.instructions:.1f} ({instructions:.1f})",
                f"{one.exponentials:.2f} ({exponentials:.2f})",
            ]
        else:
            cells += [""] * 5
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="What the compiler makes of the CUDA kernels.")
    parser.add_argument("--arch", choices=TARGETS, default="sm_90")
    parser.add_argument("--all", action="store_true", help="also the widths below 16 bytes")
    arguments = parser.parse_args()
    facts = facts_of(arguments.arch, instances(WIDTHS if arguments.all else (16,)))
    print(f"{arguments.arch}, NVRTC {'.'.join(map(str, nvrtc_version()))}; budget: an H200's\n")
    print("\n".join(table(facts)))


def nvrtc_version() -> tuple[int, int]:
    from cupy.cuda import nvrtc

    return nvrtc.getVersion()


if __name__ == "__main__":
    main()

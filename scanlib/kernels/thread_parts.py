"""Parts of a loop in threads of their own.

``run_parts`` is called like the entry of `run`, and calls it once for each of ``words.parts``
parts from ``words.part`` on, with tables of their own, and again while `then` says so. Threads are
those of the operating system, started for each call and joined before it returns: a pool would keep
its place between calls, and not survive a fork. A part for which there is no thread runs after the
first one. When the first part, which alone can be interrupted, has ended early, so do the others.

Outputs that are sums over the parts (`LoopProgram.shared`) are the first part's; others start from
zero in memory of their own, which `combining_kernel` adds, in the order of the parts. How many
parts there are depends on flags and sizes alone, and so does, bit by bit, what comes out.
"""

from __future__ import annotations

import sys
from functools import cache

import llvmlite.binding as llvm
from pytensor.configdefaults import config

from scanlib.kernels.language import INT64, POINTER, Kernel, Type, Value
from scanlib.kernels.program import AGAIN, WORD, LoopProgram, TableKernel
from scanlib.kernels.scalars import parts_of
from scanlib.kernels.spans import itemsize

# Of one part: its thread, whether that failed to start, its code, the address of the word that
# tells whether to end, its frame, its table. That word is where the first part's thread would be.
_FAILED, _CODE, _FLAG, _FRAME, _TABLE = 8, 16, 24, 32, 128


@cache
def system_has_threads() -> bool:
    """Whether the process has the threads that compiled code starts; Windows has others."""
    names = ("pthread_create", "pthread_join")
    return sys.platform != "win32" and all(llvm.address_of_symbol(name) for name in names)


def wanted_threads() -> int:
    """Return how many threads a loop may use."""
    return config.scanlib__threads if system_has_threads() else 1


def combining_kernel(program: LoopProgram) -> Kernel:
    """Return the kernel that adds a part's sums to those of the first part.

    Its table is the part's, with the addresses of the first part's sums after it.
    """
    out, words = TableKernel("combine"), program.words
    w = out.writer
    for place, number in enumerate(program.shared):
        kind, base = program.outputs[number].type, words.outputs[number]
        own = out.word(base, POINTER, f"sum{number}")
        first = out.word(words.size + place, POINTER, f"first{number}")
        items: Value = w.constant(1, INT64)
        for axis in range(kind.ndim):
            items = items * out.number(base + 1 + axis, f"dim{number}_{axis}")
        half = parts_of(kind.dtype)
        item = Type(half or kind.dtype)
        if half is not None:
            items = items * 2
        with w.loop(0, items) as i:
            offset = i * item.itemsize
            old, new = w.load(item, first, offset), w.load(item, own, offset)
            w.store(first, offset, old | new if item.dtype == "bool" else old + new)
    return out.kernel()


def parts_text(program: LoopProgram) -> str:
    """Return ``run_parts`` of a loop, in the language of LLVM."""
    choice = _choice_text(program)
    if not program.can_be_parted:
        return f"""{choice}
define i64 @run_parts(ptr %table, ptr %frame) nounwind {{
  %code = call i64 @run_entry(ptr %table, ptr %frame)
  ret i64 %code
}}"""
    words = program.words
    size = _TABLE + WORD * (words.size + len(program.shared))
    start, finish = [], []
    for place, number in enumerate(program.shared):
        output, base = program.outputs[number], words.outputs[number]
        n = f"n{number}"
        start.append(f"%{n} = add i64 0, {itemsize(output.type.dtype)}")
        for axis in range(output.type.ndim):
            start += [
                f"%{n}.p{axis} = getelementptr i8, ptr %table, i64 {WORD * (base + 1 + axis)}",
                f"%{n}.d{axis} = load i64, ptr %{n}.p{axis}",
                f"%{n}.{axis} = mul i64 %{n}, %{n}.d{axis}",
            ]
            n = f"{n}.{axis}"
        start += [
            f"%first{number}.p = getelementptr i8, ptr %table, i64 {WORD * base}",
            f"%first{number} = load ptr, ptr %first{number}.p",
            f"%sum{number} = call ptr @calloc(i64 1, i64 %{n})",
            f"%slot{number} = getelementptr i8, ptr %own, i64 {WORD * base}",
            f"store ptr %sum{number}, ptr %slot{number}",
            f"%kept{number} = getelementptr i8, ptr %own, i64 {WORD * (words.size + place)}",
            f"store ptr %first{number}, ptr %kept{number}",
        ]
        finish += [
            f"%used{number}.p = getelementptr i8, ptr %finished, i64 {WORD * base}",
            f"%used{number} = load ptr, ptr %used{number}.p",
            f"call void @free(ptr %used{number})",
        ]
    if program.shared:
        finish.insert(0, "call i64 @combine_entry(ptr %finished, ptr %frame)")
    values = {
        "SIZE": size,
        "TABLE_BYTES": WORD * words.size,
        "PARTS": WORD * words.parts,
        "PART": WORD * words.part,
        "FAILED": _FAILED,
        "CODE": _CODE,
        "FLAG": _FLAG,
        "BACK": _FLAG - _FRAME,
        "FRAME": _FRAME,
        "TABLE": _TABLE,
        "START": "\n  ".join(start),
        "FINISH": "\n  ".join(finish),
    }
    text = _TEXT
    for name, value in values.items():
        text = text.replace(f"<{name}>", str(value))
    return f"{choice}\n{text}\n{_ROUND if program.kernels.then is None else _ROUNDS}"


def _choice_text(program: LoopProgram) -> str:
    """Return ``run_entry``, which calls the `run` that the table chooses."""
    first, *others = [kernel.name for kernel in program.kernels.run]
    if not others:
        return f"""
define i64 @run_entry(ptr %table, ptr %frame) nounwind {{
  %code = call i64 @{first}_entry(ptr %table, ptr %frame)
  ret i64 %code
}}"""
    (last,) = others
    return f"""
define i64 @run_entry(ptr %table, ptr %frame) nounwind {{
  %place = getelementptr i8, ptr %table, i64 {WORD * program.words.choice}
  %choice = load i64, ptr %place
  %is.first = icmp eq i64 %choice, 0
  br i1 %is.first, label %first, label %last
first:
  %code = call i64 @{first}_entry(ptr %table, ptr %frame)
  ret i64 %code
last:
  %code2 = call i64 @{last}_entry(ptr %table, ptr %frame)
  ret i64 %code2
}}"""


_TEXT = """
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_join(i64, ptr)
declare ptr @calloc(i64, i64)
declare void @free(ptr)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
define internal ptr @part_worker(ptr %task) nounwind {
  %own = getelementptr i8, ptr %task, i64 <TABLE>
  %frame = getelementptr i8, ptr %task, i64 <FRAME>
  %code = call i64 @run_entry(ptr %own, ptr %frame)
  %place = getelementptr i8, ptr %task, i64 <CODE>
  store i64 %code, ptr %place
  ret ptr null
}
define internal i32 @part_ask(ptr %frame) nounwind {
  %place = getelementptr i8, ptr %frame, i64 <BACK>
  %flag = load ptr, ptr %place
  %wanted = load volatile i32, ptr %flag
  ret i32 %wanted
}
define internal i64 @run_round(ptr %table, ptr %frame) nounwind {
entry:
  %parts.p = getelementptr i8, ptr %table, i64 <PARTS>
  %parts = load i64, ptr %parts.p
  %several = icmp sgt i64 %parts, 1
  br i1 %several, label %many, label %one
one:
  %alone = call i64 @run_entry(ptr %table, ptr %frame)
  ret i64 %alone
many:
  %tasks = call ptr @calloc(i64 %parts, i64 <SIZE>)
  br label %start
start:
  %k = phi i64 [ 1, %many ], [ %k.next, %start ]
  %at = mul i64 %k, <SIZE>
  %task = getelementptr i8, ptr %tasks, i64 %at
  %own = getelementptr i8, ptr %task, i64 <TABLE>
  call void @llvm.memcpy.p0.p0.i64(ptr %own, ptr %table, i64 <TABLE_BYTES>, i1 false)
  %part.p = getelementptr i8, ptr %own, i64 <PART>
  %part.first = load i64, ptr %part.p
  %part = add i64 %part.first, %k
  store i64 %part, ptr %part.p
  %flag.p = getelementptr i8, ptr %task, i64 <FLAG>
  store ptr %tasks, ptr %flag.p
  %ask.p = getelementptr i8, ptr %task, i64 <FRAME>
  store ptr @part_ask, ptr %ask.p
  <START>
  %failed = call i32 @pthread_create(ptr %task, ptr null, ptr @part_worker, ptr %task)
  %failed.p = getelementptr i8, ptr %task, i64 <FAILED>
  store i32 %failed, ptr %failed.p
  %k.next = add i64 %k, 1
  %more = icmp slt i64 %k.next, %parts
  br i1 %more, label %start, label %first
first:
  %code = call i64 @run_entry(ptr %table, ptr %frame)
  %wrong = icmp ne i64 %code, 0
  %ended = zext i1 %wrong to i32
  store volatile i32 %ended, ptr %tasks
  br label %finish
finish:
  %j = phi i64 [ 1, %first ], [ %j.next, %done ]
  %at2 = mul i64 %j, <SIZE>
  %task2 = getelementptr i8, ptr %tasks, i64 %at2
  %finished = getelementptr i8, ptr %task2, i64 <TABLE>
  %failed2.p = getelementptr i8, ptr %task2, i64 <FAILED>
  %failed2 = load i32, ptr %failed2.p
  %started = icmp eq i32 %failed2, 0
  br i1 %started, label %join, label %late
join:
  %thread = load i64, ptr %task2
  call i32 @pthread_join(i64 %thread, ptr null)
  br label %done
late:
  call ptr @part_worker(ptr %task2)
  br label %done
done:
  <FINISH>
  %j.next = add i64 %j, 1
  %more2 = icmp slt i64 %j.next, %parts
  br i1 %more2, label %finish, label %end
end:
  call void @free(ptr %tasks)
  ret i64 %code
}
"""

_ROUND = """
define i64 @run_parts(ptr %table, ptr %frame) nounwind {
  %code = call i64 @run_round(ptr %table, ptr %frame)
  ret i64 %code
}"""

_ROUNDS = f"""
define i64 @run_parts(ptr %table, ptr %frame) nounwind {{
entry:
  br label %next
next:
  %code = call i64 @run_round(ptr %table, ptr %frame)
  %fine = icmp eq i64 %code, 0
  br i1 %fine, label %then, label %wrong
then:
  %decided = call i64 @then_entry(ptr %table, ptr %frame)
  %again = icmp eq i64 %decided, {AGAIN}
  br i1 %again, label %next, label %done
wrong:
  ret i64 %code
done:
  ret i64 %decided
}}"""

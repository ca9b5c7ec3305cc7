"""Containers forked from a process that has imported modules: a script cannot distinguish them from executed ones."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from backstay_cluster.kubelet.node import python_environment
from backstay_cluster.kubelet.preload import Preload
from backstay_cluster.kubelet.runtime import Process, ProcessRuntime, StartError
from backstay_cluster.kubelet.spawner import children
from backstay_cluster.tests.files import put
from backstay_cluster.tests.limits import LONG

from .test_runtime import read_pids, wait_gone

NOTE = "executed, not forked"
EARLY = (
    'import os, random\nFLAG = os.environ.get("EARLY_FLAG")\nSEED = 0\ndef seed():\n    global SEED\n    SEED += 1\n'
)
# `sys.modules` in a script is a reason to execute it, so the scripts use this expression.
WAS_PRELOADED = 'import sys; print("early" in vars(sys)["modules"], flush=True)\n'


class Bench:
    """A folder with a script, a module that is preloaded, and what is needed to run one with the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        site = folder / "site"
        site.mkdir()
        self.early = site / "early.py"
        put(self.early, EARLY)
        self.site = site
        self.env = {**python_environment(), "PYTHONPATH": str(site)}
        self.preload = Preload(("early",), prefixes=("EARLIER_",), after_fork=("early:seed",))

    def write(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        put(file, textwrap.dedent(text))

    @asynccontextmanager
    async def runtime(self, *, preload: bool = True) -> AsyncIterator[ProcessRuntime]:
        made = ProcessRuntime(preload=self.preload if preload else None, base_env=self.env)
        try:
            yield made
        finally:
            await made.close()

    async def start(self, runtime: ProcessRuntime, argv: Sequence[str], **env: str) -> tuple[Process, int]:
        """Returns the process, and a pipe from its output."""
        read, write = os.pipe()
        try:
            container = os.urandom(16).hex()
            process = await runtime.start(container, argv, {**self.env, **env}, str(self.folder), write)
        finally:
            os.close(write)
        return process, read

    async def run(self, runtime: ProcessRuntime, argv: Sequence[str], **env: str) -> tuple[int, str]:
        """Exit code and output."""
        process, read = await self.start(runtime, argv, **env)
        with os.fdopen(read, "rb") as file:
            output = (await asyncio.to_thread(file.read)).decode(errors="replace")
        return await process.exited, re.sub(r"0x[0-9a-f]+", "0x", output)  # addresses


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


LOOK = """
    import builtins, gc, os, signal, sys, threading
    module = vars(sys)["modules"]["__main__"]
    print(sys.argv, sys.orig_argv, sys.executable, sys.flags, vars(sys)["path"], sys.warnoptions)
    print(__name__, __file__, __doc__, __spec__, __package__, type(__loader__), __loader__.path, __cached__)
    print(__annotations__, __builtins__ is builtins, sorted(globals()), module.__dict__ is globals())
    print({name: value for name, value in os.environ.items() if name != "KUBELET_CONTAINER_ID"})
    print([os.path.basename(path) for path in (os.getcwd(), *vars(sys)["path"])], oct(os.umask(0)), os.nice(0))
    links = {fd: f"/proc/self/fd/{fd}" for fd in range(64)}
    print([(fd, os.readlink(link).split(":")[0]) for fd, link in links.items() if os.path.exists(link)])
    print(repr(sys.stdin.read()), sys.stdout, sys.stdout.line_buffering, sys.stdout.write_through, sys.stderr)
    print(os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), sorted(os.sched_getaffinity(0)))
    print([signal.getsignal(number) for number in range(1, 32)], signal.pthread_sigmask(signal.SIG_BLOCK, []))
    print([line for line in open("/proc/self/status") if line.startswith(("SigBlk", "SigIgn", "Threads", "NoNew"))])
    print([thread.name for thread in threading.enumerate()], threading.current_thread() is threading.main_thread())
    print(open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"), open("/proc/self/comm").read())
    words = open("/proc/self/environ").read().rstrip("\\0").split("\\0")
    print(sorted(word for word in words if not word.startswith("KUBELET_CONTAINER_ID")))
    print(open("/proc/self/limits").read(), open("/proc/self/cgroup").read(), sys.getrecursionlimit())
    print(gc.isenabled(), gc.get_threshold())
    print(sys.excepthook, sys.displayhook, sys.gettrace(), sys.getprofile(), os.getppid() > 1)
"""
FAILS = """
    def inner():
        raise KeyError("deep")
    def outer():
        try:
            inner()
        except KeyError as error:
            raise RuntimeError("outside") from error
    outer()
"""
SCRIPTS = {
    "look": LOOK,
    "traceback": FAILS,
    "traceback at top": "1 / 0\n",
    "own excepthook": "import sys, traceback\nsys.excepthook = lambda *a: traceback.print_exception(*a)\n1 / 0\n",
    "assertion with notes": "error = ValueError('v')\nerror.add_note('noted')\nraise error\n",
    "group": "raise ExceptionGroup('all', [ValueError(1), KeyError(2)])\n",
    "syntax error": "print('no'\n",
    "null byte": "print('no')\0\n",
    "coding": "# -*- coding: latin-1 -*-\nprint(ascii('é'))\n",
    "exit 0": "raise SystemExit\n",
    "exit 3": "import sys; sys.exit(3)\n",
    "exit 256": "import sys; sys.exit(256)\n",
    "exit message": "import sys; sys.exit('a message')\n",
    "exit object": "import sys; sys.exit([1])\n",
    "interrupt": "raise KeyboardInterrupt\n",
    "_exit": "import os, sys; sys.stdout.write('lost?'); os._exit(7)\n",
    "segfault": "import ctypes; ctypes.string_at(0)\n",
    "abort": "import os; os.abort()\n",
    "terminate self": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)\n",
    "broken pipe": "import os\nr, w = os.pipe()\nos.close(r)\nos.write(w, b'x')\n",
    "stop iteration": "raise StopIteration\n",
    "atexit": "import atexit; atexit.register(print, 'end'); atexit.register(print, 'before'); print('main')\n",
    "atexit after failure": "import atexit; atexit.register(print, 'end'); 1 / 0\n",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.1), print('late'))).start()\n",
    "daemon thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n",
    "thread fails": "import threading\nthreading.Thread(target=lambda: 1 / 0, name='t').start()\n",
    "handler": "import os, signal\nsignal.signal(15, lambda *a: print('caught'))\nos.kill(os.getpid(), 15)\n",
    "sigint handler": "import os\ntry:\n    os.kill(os.getpid(), 2)\nexcept KeyboardInterrupt:\n    print('caught')\n",
    "closes stdout": "import os, sys\nsys.stdout.close(); os.close(2)\n",
    "closes descriptors": "import os\nos.closerange(0, 64)\nos._exit(5)\n",
    "no newline": "print('x', end='')\n",
    "big output": "print('y' * 300000)\n",
    "recursion": "def f(n): return 0 if n == 0 else 1 + f(n - 1)\nprint(f(900))\n",
    "warning": "import warnings; warnings.warn('w', UserWarning, stacklevel=1)\n",
    "forks": "import os, sys\nif os.fork() == 0:\n    print('child'); sys.exit(3)\nprint('wait', os.wait()[1])\n",
    "subprocess": (
        "import subprocess, sys\nask = 'import os, signal; print(os.environ.get(\"A\"), signal.getsignal(13))'\n"
        "print(subprocess.run([sys.executable, '-c', ask], capture_output=True))\n"
    ),
    "pickles main": (
        "import pickle\nclass A:\n    x = 1\nprint(type(pickle.loads(pickle.dumps(A()))) is A, A.__module__, A)\n"
    ),
    "dataclass": (
        "import dataclasses, typing\n@dataclasses.dataclass\nclass A:\n    x: int = 1\n"
        "print(A(), typing.get_type_hints(A), __annotations__)\n"
    ),
    "inspects": (
        "import inspect\ndef f(): pass\nprint(inspect.getsource(f), inspect.getfile(f), inspect.getmodule(f))\n"
    ),
    "unraisable": "class A:\n    def __del__(self): 1 / 0\na = A(); del a\n",
    "gc at exit": "class A:\n    def __del__(self): print('deleted')\na = A()\n",
    "file at exit": "f = open('left', 'w'); f.write('kept')\n",
    "file of before": "print(open('left').read())\n",
    "module at exit": "import beside\n",
    "import at exit": (
        "class A:\n    def __del__(self):\n        try:\n            import early, json\n"
        "        except ImportError as e:\n            print(type(e))\na = A()\n"
    ),
    "atexit imports": "import atexit\ndef end():\n    import early; print(early.FLAG)\natexit.register(end)\n",
    "daemon thread that imports": (
        "import threading\ndef imports():\n    while True:\n        import early, json\n"
        "threading.Thread(target=imports, daemon=True).start()\n"
    ),
    "environment": "import os; os.environ['A'] = 'b'; print(os.getenv('A')); os.system('echo $A')\n",
    "stdin": "print(repr(input()))\n",
    "random": "import random, uuid\nprint(len({random.random()} | {uuid.uuid4()}))\n",
    "imports": "import early; print(early.FLAG, early.__file__, early.__spec__.name)\n",
    "faulthandler": "import faulthandler; print(faulthandler.is_enabled())\n",
    "asyncio": "import asyncio; print(asyncio.run(asyncio.sleep(0, 'done')))\n",
}
WORKERS = """
    import multiprocessing, sys
    def double(x):
        return 2 * x
    class Item:
        pass
    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        with context.Pool(2) as pool:
            print(pool.map(double, range(5)), type(pool.apply(Item)) is Item)
        process = context.Process(target=sys.exit, args=(4,))
        process.start(); process.join(); print(process.exitcode, multiprocessing.current_process())
"""


async def both(bench: Bench, *commands: Sequence[str], **env: str) -> list[list[tuple[int, str]]]:
    """Returns the ends and the outputs of each command in a new Python, and in forked processes."""
    results = []
    for preload in (False, True):
        async with bench.runtime(preload=preload) as runtime:
            results.append([await bench.run(runtime, command, **env) for command in commands])
    return results


async def test_scripts_do_the_same(bench, capfd):
    for number, text in enumerate(SCRIPTS.values()):
        bench.write(f"{number}.py", text)
    bench.write("beside.py", SCRIPTS["gc at exit"])
    commands = [["python", f"{number}.py", "a b", ""] for number in range(len(SCRIPTS))]
    executed, forked = await both(bench, *commands, A="1")
    assert dict(zip(SCRIPTS, forked, strict=True)) == dict(zip(SCRIPTS, executed, strict=True))
    # A new Python runs the scripts that do not compile, because it reports the error best.
    assert capfd.readouterr().err.count(NOTE) == len(["syntax error", "null byte"])


async def test_what_a_start_file_registers_finds_its_modules_at_the_end(bench):
    text = "import atexit\n@atexit.register\ndef end():\n    import early, json; print(early.FLAG)\n"
    put(bench.site / "sitecustomize.py", text)
    bench.write("script.py", WAS_PRELOADED)
    executed, forked = await both(bench, ["python", "script.py"])
    assert executed == [(0, "False\nNone\n")]
    assert forked == [(0, "True\nNone\n")]


async def test_one_reason_is_reported_once(bench, capfd):
    """A job may have hundreds of pods with one command."""
    bench.write("wrong.py", "1 +")
    async with bench.runtime(preload=True) as runtime:
        codes = [(await bench.run(runtime, ["python", "wrong.py"]))[0] for _ in range(3)]
    assert codes == [1, 1, 1]
    assert capfd.readouterr().err.count(NOTE) == 1


async def test_command_lines_mean_the_same(bench, capfd):
    for name in ("script.py", "sub/script.py", "a name.py", "module.py", "package/__main__.py", "package/part.py"):
        bench.write(
            name, "import sys; print(sys.argv, sys.orig_argv, vars(sys)['path'], __file__, __spec__, __package__)"
        )
    bench.write("package/__init__.py", "")
    (bench.folder / "sub/link.py").symlink_to("../script.py")
    commands = [
        ["python", "./script.py"],
        ["python", f"{bench.folder}/script.py"],
        ["python", "../work/script.py"],
        ["python", "sub/link.py"],
        ["python", "sub/script.py", "-m", "--x"],
        ["python", "a name.py"],
        [f"{Path(sys.executable).parent}/python", "script.py"],
        ["python3", "script.py"],
        ["python", "-m", "module", "x"],
        ["python", "-m", "package"],
        ["python", "-m", "package.part"],
    ]
    executed, forked = await both(bench, *commands)
    assert forked == executed
    assert {code for code, _ in executed} == {0}
    assert NOTE not in capfd.readouterr().err


@pytest.mark.parametrize("argv", [["python", "sub/script.py"], ["python", "-m", "sub.script"]])
async def test_the_folder_of_the_script_stays_out_of_a_safe_path(bench, argv):
    bench.env["PYTHONSAFEPATH"] = "1"
    bench.write("sub/script.py", "import sys; print(vars(sys)['path'], sys.flags); import beside\n")
    bench.write("sub/beside.py", "")
    executed, forked = await both(bench, argv)
    assert forked == executed
    assert {code for code, _ in executed} == {1}


async def test_a_module_fails_the_same(bench):
    bench.write("module.py", FAILS)
    executed, forked = await both(bench, ["python", "-m", "module"], ["python", "-m", "no_such_module"])
    assert forked == executed


async def test_multiprocessing_in_a_container(bench, capfd):
    bench.write("script.py", WORKERS)
    methods = ["fork", "spawn", "forkserver"]
    executed, forked = await both(bench, *(["python", "script.py", method] for method in methods))
    assert forked == executed
    assert {code for code, _ in executed} == {0}, executed
    assert NOTE not in capfd.readouterr().err


WRITES = "import os; e = os.environ; e['EARLY_FLAG'] = 'l'"
IMPORTS_EARLY = "import early; print(early.FLAG)\n"


@pytest.mark.parametrize(
    ("files", "argv", "env"),
    [
        ({"script.py": IMPORTS_EARLY}, ["python", "script.py"], {"EARLY_FLAG": "1"}),
        ({"script.py": "print(1)"}, ["python", "script.py"], {"EARLIER_ANY": "1"}),
        ({"script.py": "print(len({'a': 1}))"}, ["python", "script.py"], {"PYTHONHASHSEED": "1"}),
        ({"script.py": "print(1)"}, ["python", "script.py"], {"MALLOC_ARENA_MAX": "1"}),
        ({"script.py": IMPORTS_EARLY, "early.py": "FLAG = 'mine'"}, ["python", "script.py"], {}),
        ({"script.py": IMPORTS_EARLY, "early/__init__.py": "FLAG = 'mine'"}, ["python", "script.py"], {}),
        ({"script.py": "import os; os.environ['EARLY_FLAG'] = 's'\n" + IMPORTS_EARLY}, ["python", "script.py"], {}),
        ({"script.py": "import os; os.environ.update(EARLY_FLAG='u')\n" + IMPORTS_EARLY}, ["python", "script.py"], {}),
        ({"script.py": "import os; os.putenv('X', 'p')\n" + IMPORTS_EARLY}, ["python", "script.py"], {}),
        (
            {"script.py": "import setup_flags\n" + IMPORTS_EARLY, "setup_flags.py": WRITES},
            ["python", "script.py"],
            {},
        ),
        (
            {"script.py": "import sys; sys.path.insert(0, 'lib')\n" + IMPORTS_EARLY, "lib/early.py": "FLAG = 'lib'"},
            ["python", "script.py"],
            {},
        ),
        ({"script.py": IMPORTS_EARLY}, ["python", "-u", "script.py"], {}),
        ({"script.py": IMPORTS_EARLY}, ["python", "-c", IMPORTS_EARLY], {}),
        ({"script.py": IMPORTS_EARLY}, ["python", "gone.py"], {}),
        ({"script.py": IMPORTS_EARLY}, ["python", "archive.py"], {}),
        ({"script.py": IMPORTS_EARLY}, ["python", "-m", "early.no"], {}),
        ({"script.py": IMPORTS_EARLY}, ["sh", "-c", "exec python script.py"], {}),
    ],
)  # fmt: skip
async def test_what_early_imports_could_change_is_executed(bench, files, argv, env):
    for name, text in files.items():
        bench.write(name, text)
    with zipfile.ZipFile(bench.folder / "archive.py", "w") as archive:
        archive.writestr("__main__.py", "print('from the archive')")
    executed, forked = await both(bench, argv, **env)
    assert forked == executed


FINDS = """
import importlib.util, pathlib, sys
HERE = pathlib.Path(__file__).parent
class Finder:
    def find_spec(name, path=None, target=None):
        for key, inner in ((name, None), (name + "--__init__", [])):
            file = HERE / (key.replace(".", "--") + ".py")
            if file.is_file():
                return importlib.util.spec_from_file_location(name, file, submodule_search_locations=inner)
sys.meta_path.insert(0, Finder)
import early, package.part
print("early" in early.__spec__.name, early.FLAG, package.part.FOUND)
"""
PACKAGE = {"finds.py": FINDS, "package--__init__.py": "", "package--part.py": "FOUND = 1\n"}


@pytest.mark.parametrize(
    ("more", "known", "forked"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"package--part.py": "import os; os.environ['EARLY_FLAG'] = 's'; FOUND = 2\n"}, True, False),
        ({"package--__init__.py": "import beside\n", "beside.py": WRITES}, True, False),
        ({"early--__init__.py": "FLAG = 'mine'\n"}, True, False),
        ({"early.py": "FLAG = 'mine'\n"}, True, False),
    ],
)
async def test_a_known_program_that_finds_modules_beside_it_is_forked(bench, capfd, more, known, forked):
    """These modules must not change the environment or hide a preloaded module, like those that a script imports."""
    for name, text in {**PACKAGE, **more}.items():
        put(bench.folder / name, text)
    if known:
        bench.preload = replace(bench.preload, finders=(hashlib.sha256(FINDS.encode()).hexdigest(),))
    (slow,), (quick,) = await both(bench, ["python", "finds.py"])
    assert slow == quick
    assert slow[0] == 0
    assert (NOTE not in capfd.readouterr().err) == forked


async def test_an_installed_module_that_changes_is_imported_again(bench):
    bench.write("script.py", WAS_PRELOADED + IMPORTS_EARLY)
    async with bench.runtime() as runtime:
        assert await bench.run(runtime, ["python", "script.py"]) == (0, "True\nNone\n")
        put(bench.early, "FLAG = 'a newer release'\n")
        code, output = await bench.run(runtime, ["python", "script.py"])
        assert (code, output.split("\n", 1)[1]) == (0, "a newer release\n")


async def test_random_numbers_are_each_containers_own(bench):
    bench.write("script.py", "import early, random\nprint(early.SEED, random.random())\n")
    async with bench.runtime() as runtime:
        lines = [(await bench.run(runtime, ["python", "script.py"]))[1] for _ in range(3)]
    assert {line.split()[0] for line in lines} == {"1"}
    assert len(set(lines)) == 3


@pytest.mark.parametrize(
    "text",
    [
        "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "import os, time\nif os.fork() == 0:\n    time.sleep(600)",
        "file = open('/dev/null')",
        "raise RuntimeError",
        "import sys; sys.exit(3)",
        "import os; os._exit(0)",
    ],
)
async def test_a_module_that_cannot_be_shared_is_left_out(bench, text):
    """The others are preloaded still; where the import ends the process itself, containers are executed."""
    put(bench.site / "unfit.py", text)
    bench.preload = Preload(("unfit", "not_installed", "early"))
    bench.write("script.py", WAS_PRELOADED)
    async with bench.runtime() as runtime:
        dies = "_exit" in text
        assert await bench.run(runtime, ["python", "script.py"]) == (0, f"{not dies}\n")


def forkserver_of(runtime: ProcessRuntime) -> int:
    """Returns the forkserver's process id."""
    assert runtime.pid is not None
    found = [pid for pid in children(runtime.pid) if b"preloaded" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found[0]


SLEEPS = WAS_PRELOADED + "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n"


async def first_lines(read: int, count: int) -> list[str]:
    def lines() -> list[str]:
        with os.fdopen(os.dup(read), "r") as file:
            return [file.readline().strip() for _ in range(count)]

    return await asyncio.wait_for(asyncio.to_thread(lines), LONG)


async def test_a_container_that_ends_while_the_spawner_is_busy_has_an_exit_code(bench: Bench) -> None:
    """The spawner finds a note, the start and the end together. It reported the start last, and the pod never ended."""
    bench.write("broken.py", "import early\n(")
    async with bench.runtime() as runtime:
        await bench.run(runtime, [sys.executable, "-c", "pass"])
        spawner = runtime.pid
        assert spawner is not None
        for pause in (0.0, 0.002, 0.005, 0.01, 0.02):
            one = asyncio.create_task(bench.run(runtime, [sys.executable, "broken.py"]))
            await asyncio.sleep(pause)
            os.kill(spawner, signal.SIGSTOP)
            try:
                await asyncio.sleep(0.15)
            finally:
                os.kill(spawner, signal.SIGCONT)
            code, _ = await asyncio.wait_for(one, LONG)
            assert code == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP])
async def test_the_death_of_the_forkserver_touches_no_container(bench, number):
    """The containers run on and report their ends; new ones start, whether the forkserver is dead or only
    stopped."""
    bench.write("sleeps.py", SLEEPS)
    bench.write("script.py", WAS_PRELOADED)
    async with bench.runtime() as runtime:
        process, read = await bench.start(runtime, ["python", "sleeps.py"])
        assert await first_lines(read, 2) == ["True", str(process.pid)]
        victim = forkserver_of(runtime)
        os.kill(victim, number)
        assert (await bench.run(runtime, ["python", "script.py"]))[0] == 0
        # The one after that comes from the next forkserver.
        assert await bench.run(runtime, ["python", "script.py"]) == (0, "True\n")
        assert forkserver_of(runtime) != victim
        await asyncio.to_thread(wait_gone, victim)
        assert not process.exited.done()
        runtime.kill(process, signal.SIGTERM)
        assert await process.exited == 143
        os.close(read)


async def test_a_forkserver_that_always_dies_is_given_up(bench, capfd):
    put(bench.early, "import os; os._exit(1)\n")
    bench.write("script.py", WAS_PRELOADED)
    async with bench.runtime() as runtime:
        for _ in range(4):
            assert await bench.run(runtime, ["python", "script.py"]) == (0, "False\n")
    assert capfd.readouterr().err.count("no forkserver is started again") == 1


async def test_many_containers_at_the_same_time(bench):
    bench.write("script.py", WAS_PRELOADED + "raise SystemExit(int(sys.argv[1]))\n")
    async with bench.runtime() as runtime:
        runs = [bench.run(runtime, ["python", "script.py", str(i)]) for i in range(20)]
        found = await asyncio.gather(*runs)
    assert found == [(i, "True\n") for i in range(20)]


async def test_more_containers_than_descriptors_do_not_end_the_spawner(bench):
    """While the forkserver imports, each waiting container takes descriptors. Others are running."""
    put(bench.early, "import time; time.sleep(1)\n" + EARLY)
    bench.write("script.py", "raise SystemExit(int(__import__('sys').argv[1]))\n")
    async with bench.runtime() as runtime:
        first, read = await bench.start(runtime, ["sh", "-c", "echo up; sleep 3600"])
        assert await asyncio.to_thread(os.read, read, 9) == b"up\n"
        (spawner,) = (pid for pid in children(os.getpid()) if first.pid in children(pid))
        resource.prlimit(spawner, resource.RLIMIT_NOFILE, (100, 100))
        runs = [bench.run(runtime, ["python", "script.py", str(i)]) for i in range(100)]
        found = await asyncio.gather(*runs)
        assert not first.exited.done()
        runtime.kill(first, signal.SIGKILL)
        await first.exited
        os.close(read)
    assert [code for code, _ in found] == list(range(100))


async def test_a_signal_reaches_a_forked_container(bench):
    bench.write("sleeps.py", SLEEPS)
    async with bench.runtime() as runtime:
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV):
            process, read = await bench.start(runtime, ["python", "sleeps.py"])
            await first_lines(read, 2)
            os.kill(process.pid, signal.SIGSTOP)
            runtime.kill(process, number)
            runtime.kill(process, signal.SIGCONT)
            assert await process.exited == 128 + number
            os.close(read)


LEAVES = """
    import os, signal, subprocess, time
    pids = [subprocess.Popen(["sleep", "600"]).pid, subprocess.Popen(["sleep", "600"], start_new_session=True).pid]
    read, write = os.pipe()
    if os.fork() == 0:  # not executed: its environment in /proc is the one that it was forked with
        os.setsid()
        if os.fork() == 0:
            os.write(write, str(os.getpid()).encode())
            time.sleep(600)
        os._exit(0)
    os.wait()
    pids.append(int(os.read(read, 64)))
    print(os.getpid(), *pids, flush=True)
    time.sleep(600)
"""


async def test_a_forked_container_leaves_no_process_behind(bench):
    bench.write("script.py", LEAVES)
    async with bench.runtime() as runtime:
        for number in (signal.SIGTERM, signal.SIGKILL):
            process, read = await bench.start(runtime, ["python", "script.py"])
            pids = await asyncio.to_thread(read_pids, read, 4)
            assert process.pid == pids[0]
            runtime.kill(process, number)
            assert await process.exited == 128 + number
            for pid in pids:
                await asyncio.to_thread(wait_gone, pid)
            os.close(read)


KUBELET = """
import asyncio, os, sys
from backstay_cluster.kubelet.preload import Preload
from backstay_cluster.kubelet.runtime import ProcessRuntime
async def main():
    env = dict(os.environ)
    runtime = ProcessRuntime(preload=Preload(("json",)), base_env=env)
    runtime.open()
    print(runtime.pid, flush=True)
    await runtime.start("0" * 31 + "1", ["python", "script.py"], env, sys.argv[1], 1)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["kubelet", "spawner"])
def test_no_process_outlives_the_kubelet_or_the_spawner(bench, victim):
    bench.write("script.py", LEAVES)
    command = [sys.executable, "-c", KUBELET, str(bench.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=bench.env) as parent:
        try:
            pids = read_pids(parent.stdout.fileno(), 5)
            spawner, main = pids[:2]
            # A process that changed its session loses its subreaper with the spawner; the spawner's own children die
            # with it.
            own = {spawner, main, *children(spawner)} - set(pids[2:])
            os.kill(parent.pid if victim == "kubelet" else spawner, signal.SIGKILL)
            for pid in {*own, *pids} if victim == "kubelet" else own:
                wait_gone(pid)
        finally:
            parent.kill()
            for pid in pids:
                kill_quietly(pid)


def kill_quietly(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


async def test_a_forked_process_reports_what_cannot_start(bench):
    bench.write("script.py", "")
    async with bench.runtime() as runtime:
        read, write = os.pipe()
        with pytest.raises(StartError, match="chdir: No such file"):
            await runtime.start("0" * 31 + "1", ["python", "script.py"], bench.env, "/no/such/folder", write)
        env = {**bench.env, "PATH": "/no/such/folder"}
        with pytest.raises(StartError, match="exec: No such file"):
            await runtime.start("0" * 31 + "2", ["python", "script.py"], env, str(bench.folder), write)
        os.close(read)
        os.close(write)


def test_preload_is_read_as_it_is_written():
    one = Preload(("a", "b"), {"C": "d"}, {"E": "f"}, ("G_",), ("h:i",), ("j.k",))
    assert Preload.of_json(one.to_json()) == one
    for wrong in ("[]", "{}", '{"modules": [], "else": 1}', "1", "null", "x"):
        with pytest.raises(ValueError, match=r"preload|Expecting value"):
            Preload.of_json(wrong)

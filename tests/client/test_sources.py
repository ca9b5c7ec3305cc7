"""The code of a function travels as source files, and starts in a pod as it did here."""

from __future__ import annotations

import ast
import functools
import json
import linecache
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from between import LONG, put

from backstay_client import BadInput
from backstay_client.code.cells import names_from_outside
from backstay_client.code.imports import user_folders
from backstay_client.code.sources import MOST_BYTES, SourceFiles, of_function, of_script

Written = Callable[[str, str], ModuleType]


def started(sources: SourceFiles, folder: Path, arguments: object = None) -> str:
    """Returns the output of the code in a process that has only the files of the ConfigMap."""
    found = sources.config_map("code", "default")
    folder.mkdir(exist_ok=True)
    for key, text in found["data"].items():
        put(folder / key, text)
    _, *words = sources.command(arguments)  # type: ignore[arg-type]
    done = subprocess.run(
        [sys.executable, *(word.replace("$$(", "$(") for word in words)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LONG,
        env={"PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_script_travels_with_the_modules_beside_it_and_not_with_those_of_this_process(
    written: Written, tmp_path: Path
) -> None:
    """This process may have imported another module of the same name."""
    assert written("shared_name", "WHERE = 'this process'\n").WHERE == "this process"
    folder = tmp_path / "jobs"
    folder.mkdir()
    put(folder / "shared_name.py", "WHERE = 'beside the script'\n")
    (folder / "jax").mkdir()  # Python prefers an installed package to a folder without __init__.py
    put(folder / "jax" / "numpy.py", "raise AssertionError\n")
    script = folder / "job.py"
    put(script, "import jax.numpy\nimport shared_name\n\nprint(shared_name.WHERE)\n")
    found = of_script(script)
    assert "raise AssertionError" not in str(found.config_map("code", "default")["data"])
    put(script, "import shared_name\n\nprint(shared_name.WHERE)\n")
    assert started(of_script(script), tmp_path / "pod") == "beside the script\n"


def test_a_function_of_a_package_travels_with_what_its_module_imports(
    written: Written, user_folder: Path, tmp_path: Path
) -> None:
    """Relative imports, packages with and without `__init__.py`, and imports inside functions work in the pod."""
    (user_folder / "models").mkdir()
    put(user_folder / "models" / "__init__.py", "WIDTH = 3\n")
    written("spaces.inner.deep", "DEPTH = 5\n")
    written("models.net", "from . import WIDTH\n")
    written("models.parts", "")
    written("unused", "X = 1\n")
    module = written(
        "models.job",
        "from . import WIDTH\nfrom .net import WIDTH as SAME\n\n\ndef train(rate):\n"
        "    from spaces.inner.deep import DEPTH\n    from . import parts\n"
        "    print(rate, WIDTH, SAME, DEPTH, parts.__name__, __name__)\n",
    )
    sources = of_function(module.train)
    assert set(sources.files) == {
        "models--__init__.py",
        "models--net.py",
        "models--parts.py",
        "models--job.py",
        "spaces--inner--deep.py",
        "backstay_entry.py",
        "backstay_modules.json",
    }
    assert started(sources, tmp_path / "pod", {"rate": 0.5}) == "0.5 3 3 5 models.parts models.job\n"


def test_modules_of_installed_packages_do_not_travel(written: Written, tmp_path: Path) -> None:
    module = written("uses", "import json\nimport numpy\nimport optax\n\n\ndef train():\n    pass\n")
    assert set(of_function(module.train).files) == {"uses.py", "backstay_entry.py", "backstay_modules.json"}
    installed = of_function(ast.parse)
    assert set(installed.files) == {"backstay_entry.py", "backstay_modules.json"}, "the image has the package"
    assert not any("site-packages" in str(folder) for folder in user_folders([tmp_path]))


def test_a_folder_that_the_user_put_on_the_path_travels_too(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    put(shared / "lab_tools.py", "VALUE = 7\n")
    monkeypatch.syspath_prepend(str(shared))
    module = written("uses_tools", "import lab_tools\n\n\ndef train():\n    print(lab_tools.VALUE)\n")
    assert started(of_function(module.train), tmp_path / "pod") == "7\n"


def test_a_script_runs_as_main_with_its_arguments(user_folder: Path, tmp_path: Path) -> None:
    put(user_folder / "beside.py", "X = 2\n")
    script = user_folder / "my-script.py"
    put(script, "import sys\nimport beside\nprint(__name__, sys.argv[1:], beside.X)\n")
    sources = of_script(script)
    assert sources.name == "my-script"
    arguments = {"learning_rate": 0.1, "fast": True, "slow": False, "text": "$(HOME)"}
    words = ["--learning-rate", "0.1", "--fast", "--text", "$(HOME)"]
    assert started(sources, tmp_path / "pod", arguments) == f"__main__ {words} 2\n"
    assert json.loads(sources.command(["a", 1])[2])["args"] == ["a", "1"]


def test_arguments_are_checked_before_anything_is_created(written: Written) -> None:
    module = written("takes", "def train(rate, steps=3):\n    pass\n")
    sources = of_function(module.train)
    value = np.float32(0.5)
    assert json.loads(sources.command({"rate": value})[2]) == {"function": "train", "args": {"rate": 0.5}}
    with pytest.raises(BadInput, match=r"unexpected keyword argument 'rat'; its parameters are: rate, steps"):
        sources.command({"rate": 1, "rat": 1})
    with pytest.raises(BadInput, match=r"args\['rate'\]: is ndarray: must be a number"):
        sources.command({"rate": np.zeros(3)})
    with pytest.raises(BadInput, match=r"args\['rate'\]: is dict: must be"):
        sources.command({"rate": {1: 2}})
    with pytest.raises(BadInput, match="must be a mapping of the keyword arguments"):
        sources.command([1])
    with pytest.raises(BadInput, match="at most 100,000 are passed"):
        sources.command({"rate": "x" * 100_000})


def test_code_above_a_mebibyte_names_its_largest_files_and_the_remedy(written: Written) -> None:
    written("words", f"WORDS = {'x' * MOST_BYTES!r}\n")
    written("small", "X = 1\n")
    module = written("large", "import small, words\n\n\ndef train():\n    pass\n")
    with pytest.raises(BadInput) as caught:
        of_function(module.train).config_map("code", "default")
    text = str(caught.value)
    assert "a ConfigMap holds at most 1,024 KiB" in text
    assert "The largest files are words.py (1,024 KiB), " in text
    assert "build an image" in text


def test_functions_that_a_pod_cannot_import_are_refused_with_a_remedy(written: Written) -> None:
    module = written("objects", "def train():\n    pass\n\n\nclass A:\n    def train(self):\n        pass\n")

    def inner() -> None: ...

    for wrong in (lambda: None, inner, module.A.train):
        with pytest.raises(BadInput, match="define it at the top level of a module"):
            of_function(wrong)
    with pytest.raises(BadInput, match=r"use args=\{\.\.\.\}, and not functools\.partial"):
        of_function(functools.partial(module.train))
    before = module.train
    module.train = lambda: None
    with pytest.raises(BadInput, match="the module objects has another object under the name train"):
        of_function(before)
    put(Path("bad.py"), "def (:\n")
    with pytest.raises(BadInput, match=r"bad\.py, line 1: .*: the code cannot be read"):
        of_script(Path("bad.py"))


def cell(text: str) -> tuple[Callable[..., object], dict[str, ModuleType]]:
    """Returns the function `train` of a notebook cell, which IPython defines in a main module without a file."""
    main = types.ModuleType("__main__")
    place = f"<ipython-input-{abs(hash(text))}>"
    linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
    exec(compile(text, place, "exec"), main.__dict__)
    function = main.__dict__["train"]
    return function, {"__main__": main}


def test_a_self_contained_function_of_a_notebook_cell_travels_alone(user_folder: Path, tmp_path: Path) -> None:
    put(user_folder / "beside.py", "X = 2\n")
    function, loaded = cell(
        "LIMIT = 3\n\n\ndef train(rate: 'Unknown' = 0.1, *rest):\n    import beside\n"
        "    n = len([i for i in range(4)])\n    def inner(): return n + beside.X\n    print(rate, inner())\n"
    )
    assert started(of_function(function, loaded), tmp_path / "pod", {"rate": 0.5}) == "0.5 6\n"


def test_a_function_of_a_notebook_cell_that_uses_other_cells_is_refused_by_name() -> None:
    function, loaded = cell("import math\nLIMIT = 3\n\n\ndef train():\n    return math.sin(LIMIT)\n")
    with pytest.raises(BadInput) as caught:
        of_function(function, loaded)
    assert "the function train of a notebook cell uses LIMIT, math from outside" in str(caught.value)
    assert "%%writefile" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f(a, b=1):\n    return a + b", set()),
        ("def f(a=outer):\n    return a", {"outer"}),
        ("@decorated\ndef f():\n    pass", {"decorated"}),
        ("def f():\n    global g\n    g = 1\n    return g", set()),
        ("def f():\n    return [x for x in values if x in range(3)]", {"values"}),
        ("def f():\n    class A(Base):\n        y = 1\n    return A", {"Base"}),
        ("def f(x: np.ndarray) -> 'y':\n    z: np.ndarray = x\n    return z", set()),
        ("def f(n):\n    return f(n - 1) if n else 0", set()),
    ],
)
def test_the_names_that_a_function_uses_from_outside(text: str, names: set[str]) -> None:
    assert names_from_outside(ast.parse(text), "f") == names


def test_a_function_without_a_known_source_is_refused() -> None:
    main = types.ModuleType("__main__")
    exec("def train(): pass", main.__dict__)
    with pytest.raises(BadInput, match="was not defined in a file: write the cell to a file"):
        of_function(main.__dict__["train"], {"__main__": main})


def test_a_function_of_the_main_script_is_imported_under_the_name_of_its_file(user_folder: Path) -> None:
    """Pods import the script that submitted its own function, and so do not submit again."""
    put(
        user_folder / "submit_me.py",
        "from backstay_client.code.sources import of_function\n\n\ndef train():\n    print('trained', __name__)\n\n\n"
        "if __name__ == '__main__':\n    import json\n    found = of_function(train)\n"
        "    print(found.name, json.loads(found.files['backstay_modules.json'])['main'], sorted(found.files))\n",
    )
    done = subprocess.run([sys.executable, "submit_me.py"], capture_output=True, text=True, timeout=LONG, check=True)
    assert done.stdout == "submit-me submit_me ['backstay_entry.py', 'backstay_modules.json', 'submit_me.py']\n"

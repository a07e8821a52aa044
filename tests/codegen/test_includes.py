"""The include graph of the templates."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlagen.codegen.includes import IncludeError, Text, flatten, included_name, transitive_includes

FOLDER = "kernels/a"
KERNEL = "kernels/a/kernel.cu.j2"


def write(root: Path, **texts: str) -> None:
    """Write templates; ``a__b`` in a name stands for ``a/b``, and the ending is .cuh."""
    for name, text in texts.items():
        is_kernel = name == "kernel"
        path = root / (KERNEL if is_kernel else name.replace("__", "/") + ".cuh")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def plain_text(root: Path, name: str) -> Text:
    """Return a file without Jinja: every line came from itself."""
    lines = (root / name).read_text().split("\n")
    return Text(lines, [f"{name}:{number}" for number in range(1, len(lines) + 1)])


def flat(root: Path) -> Text:
    """Return the kernel of ``root`` as one text."""
    return flatten(root, FOLDER, lambda name: plain_text(root, name))


def test_each_file_comes_once_after_those_it_includes(tmp_path: Path) -> None:
    """The order is that of dependencies, whatever the order of the directives."""
    write(
        tmp_path,
        kernel='// k\n\n#include "common/b.cuh"\n#include "common/c.cuh"\n\nint k;\n',
        common__b='#include "common/c.cuh"\n#include "common/d.cuh"\n\nint b;\n',
        common__c='#include "common/d.cuh"\nint c;\n',
        common__d="int d;\n",
    )

    text = flat(tmp_path)

    assert text.lines == ["int d;", "", "int c;", "", "int b;", "", "// k", "", "int k;"]
    assert text.origins[0] == "common/d.cuh:1"
    assert text.origins[2] == "common/c.cuh:2"
    assert text.origins[-1] == f"{KERNEL}:6"


def test_the_folder_of_the_kernel_comes_first(tmp_path: Path) -> None:
    """A shared file gets the config of the family, from the file with Jinja if there is one."""
    write(
        tmp_path,
        kernel='#include "common/b.cuh"\nint k;\n',
        common__b='#include "config.cuh"\nint b;\n',
    )
    (tmp_path / "kernels/a/config.cuh.j2").write_text("int config;\n")
    found = transitive_includes(tmp_path, FOLDER)
    assert found == {KERNEL, "common/b.cuh", "kernels/a/config.cuh.j2"}
    assert flat(tmp_path).lines[0] == "int config;"


def test_kernels_of_a_family_share_the_folder_above(tmp_path: Path) -> None:
    """Each finds its own files, those beside its folder, and the shared ones."""
    write(
        tmp_path,
        kernel='#include "one.cuh"\nint k;\n',
        kernels__a__one='#include "two.cuh"\nint one;\n',
        kernels__a__b__two='#include "common/c.cuh"\nint b;\n',
        kernels__a__d__two="int d;\n",
        common__c="int c;\n",
    )
    for folder, first in (("kernels/a/b", "int c;"), ("kernels/a/d", "int d;")):
        text = flatten(tmp_path, folder, lambda name: plain_text(tmp_path, name))
        assert (text.lines[0], text.lines[-1]) == (first, "int k;")


def test_a_file_that_only_chooses_leaves_no_trace(tmp_path: Path) -> None:
    """Comments around nothing but directives are not rendered."""
    write(
        tmp_path,
        kernel='#include "b.cuh"\nint k;\n',
        kernels__a__b='// Chooses.\n\n#include "common/c.cuh"\n',
        common__c="int c;\n",
    )
    assert flat(tmp_path).lines == ["int c;", "", "int k;"]


def test_all_branches_count_for_the_key(tmp_path: Path) -> None:
    """What Jinja would leave out is in the transitive set."""
    write(
        tmp_path,
        kernel='{% if spec.x %}\n#include "b.cuh"\n{% else %}\n#include "c.cuh"\n{% endif %}\n',
        kernels__a__b="int b;\n",
        kernels__a__c="int c;\n",
    )
    found = transitive_includes(tmp_path, FOLDER)
    assert found == {KERNEL, "kernels/a/b.cuh", "kernels/a/c.cuh"}


CYCLE = "common/b.cuh -> common/c.cuh -> common/b.cuh"
ERRORS: dict[str, tuple[str, dict[str, str]]] = {
    "a cycle, at the directive that closes it": (
        f'common/c.cuh:3: #include "common/b.cuh": cycle: {CYCLE}',
        {
            "kernel": '#include "common/b.cuh"\n',
            "common__b": '// b\n#include "common/c.cuh"\n',
            "common__c": '// c\n\n#include "common/b.cuh"\n',
        },
    ),
    "a file of the family in the place of a shared one": (
        f'{KERNEL}:1: #include "common/b.cuh": ambiguous: kernels/a/common/b.cuh, common/b.cuh',
        {
            "kernel": '#include "common/b.cuh"\n',
            "common__b": "int b;\n",
            "kernels__a__common__b": "int b;\n",
        },
    ),
}


@pytest.mark.parametrize(("message", "texts"), ERRORS.values(), ids=ERRORS)
def test_an_ambiguous_order_is_an_error(
    message: str, texts: dict[str, str], tmp_path: Path
) -> None:
    """The message has the file and line of the directive, and all files that are concerned."""
    write(tmp_path, **texts)

    with pytest.raises(IncludeError) as caught:
        flat(tmp_path)

    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["none.cuh", "../secret.cuh", "/secret.cuh", "{{ spec.x }}.cuh"])
def test_a_missing_file_is_an_error(name: str, tmp_path: Path) -> None:
    """So is a path out of the folder and a name that is computed."""
    root = tmp_path / "templates"
    write(root, kernel=f'// k\n#include "{name}"\n')
    (tmp_path / "secret.cuh").write_text("int a;\n")
    for resolve in (flat, lambda root: transitive_includes(root, FOLDER)):
        with pytest.raises(IncludeError) as caught:
            resolve(root)
        assert str(caught.value).startswith(f'{KERNEL}:2: #include "{name}": expected a file in ')


@pytest.mark.parametrize("operand", ["<cuda.h>", "", '"a.cuh" "b.cuh"', "FILE"])
def test_only_a_name_in_quotes_is_included(operand: str) -> None:
    """There are no headers where kernels are compiled."""
    with pytest.raises(IncludeError) as caught:
        included_name(f"#include {operand}", "a.cuh:7")
    assert str(caught.value) == f'a.cuh:7: #include: expected "FILE", got {operand}'

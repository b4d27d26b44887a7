"""Build the wheel, in which all packages lie below `longhaul`.

setuptools uses `BuildWheel` (pyproject.toml). It copies the packages and rewrites the
statements that import them. An editable installation uses the files of the clone.
"""

import ast
import re
from pathlib import Path

from setuptools.command.build_py import build_py

# With these files, other machines can install an archive (launch/archive.py).
SETUP_FILES = ("LICENSE", "README.md", "constraints.txt", "pyproject.toml")
_KEYWORD = re.compile(rb"(from|import)\s+")
MOVED = ("configs", "data", "launch", "model", "train")


def with_moved_imports(source: str) -> str:
    """Return Python code whose imports of the moved packages are below `longhaul`.

    Nothing else changes, and each line keeps its number.

    Raises:
        ValueError: a statement such as `import train.start` binds the name `train`,
            which would no longer exist. Write `from train import start`.
    """
    lines = source.split("\n")
    places = list[tuple[int, int]]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            moves = not node.level and _is_moved(node.module or "")
        elif isinstance(node, ast.Import):
            moves = any(_is_moved(name.name) for name in node.names)
            if moves and not (len(node.names) == 1 and node.names[0].asname):
                text = (
                    "write `from ... import ...`, so that no name of a package is bound"
                )
                raise ValueError(f"line {node.lineno}: {text}")
        else:
            continue
        if moves:
            places.append((node.lineno - 1, node.col_offset))
    for number, column in sorted(places, reverse=True):
        line = lines[number].encode()  # `ast` counts columns in bytes
        statement = _KEYWORD.sub(rb"\g<0>longhaul.", line[column:], count=1)
        lines[number] = (line[:column] + statement).decode()
    return "\n".join(lines)


class BuildWheel(build_py):
    """Copies the packages below `longhaul`, with imports rewritten."""

    def finalize_options(self) -> None:
        """Put the packages below `longhaul`, unless the installation is editable."""
        super().finalize_options()
        if not self.editable_mode:
            self.packages = [_moved(package) for package in self.packages]
            names = [name for name in self.packages if name.count(".") == 1]
            self.package_dir = {name: name.partition(".")[2] for name in names}

    def run(self) -> None:
        """Copy all files, and also those that an archive needs."""
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "longhaul", "setup")
            self.mkpath(str(folder))
            for name in SETUP_FILES:
                self.copy_file(name, str(folder / name))

    def build_module(self, module, module_file, package):  # type: ignore[no-untyped-def]
        """Copy a module, and rewrite its imports."""
        written, copied = super().build_module(module, module_file, package)
        if not self.editable_mode:
            path = Path(written)
            path.write_text(with_moved_imports(path.read_text("utf-8")), "utf-8")
        return written, copied


def _is_moved(module: str) -> bool:
    return module.partition(".")[0] in MOVED


def _moved(package: str) -> str:
    return f"longhaul.{package}" if _is_moved(package) else package

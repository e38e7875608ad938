"""Run the notebooks of docs/ and store their outputs; convert a notebook to Markdown for the site.

`python .ci/notebooks.py [NOTEBOOK...]` runs notebooks from top to bottom, each in an empty folder. This takes minutes.
A stored notebook has the digest of the code that made its outputs, and the tests compare it with the code.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def notebooks() -> list[Path]:
    """Return the notebooks of the documentation."""
    return sorted(DOCS.glob("*.ipynb"))


def code_of(notebook: dict[str, Any]) -> list[str]:
    """Return the code of each cell."""
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def digest(notebook: dict[str, Any]) -> str:
    """Return a digest of all code."""
    return hashlib.sha256("\0".join(code_of(notebook)).encode()).hexdigest()


def markdown(text: str) -> str:
    """Return a notebook as a page: text, code, printed lines, and figures as data URIs."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if printed := "".join(output.get("text", "")):
                parts.append(f"```text\n{printed.rstrip()}\n```")
            if image := output.get("data", {}).get("image/png"):
                parts.append(f"![Figure](data:image/png;base64,{image.strip()})")
    return "\n\n".join(parts) + "\n"


def run(path: Path) -> None:
    """Run a notebook, and store it with what it printed and drew."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": folder}}).execute()
    for number, cell in enumerate(notebook.cells):
        cell.update(id=f"cell-{number}", metadata={})
        if cell.cell_type == "code":
            cell.outputs = [kept for output in cell.outputs if (kept := _kept(output))]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "digest": digest(notebook),
    }
    nbformat.write(notebook, path)


def _kept(output: Any) -> Any:
    """Return printed lines as they are, a figure only as such, and None for progress."""
    if "image/png" in output.get("data", {}):
        output.update(metadata={}, data={"image/png": output.data["image/png"]})
        return output
    return output if output.get("name") == "stdout" else None


if __name__ == "__main__":
    for chosen in [Path(name) for name in sys.argv[1:]] or notebooks():
        run(chosen)
        print(chosen)

"""Strip on save, loaded by ``make lab`` through JUPYTER_CONFIG_PATH: outputs stay on screen only.

DVC hashes the working tree, so a saved output, or another machine's Python version in the metadata,
would make the stage run again.
"""

import nbformat
from nbstripout import strip_output

# The same on every machine, whatever kernel was picked on screen.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
EXTRA_KEYS = ["cell.metadata.collapsed", "cell.metadata.execution", "cell.metadata.scrolled"]


def strip_on_save(model, path="", **_):
    """Strip a notebook in place before Jupyter writes it; executed copies keep their outputs."""
    if model["type"] != "notebook" or path.startswith("data/"):
        return
    notebook = nbformat.from_dict(model["content"])
    strip_output(notebook, False, False, keep_id=True, extra_keys=EXTRA_KEYS)
    notebook.metadata = nbformat.from_dict(METADATA)
    model["content"] = notebook


c = get_config()  # noqa: F821 (Jupyter defines it when it loads this file)
c.ContentsManager.pre_save_hook = strip_on_save

"""What the documents say about code is generated from it, or checked against it."""

import re
from pathlib import Path

from experiments.faults import FAULTS
from recorder.schema import markdown_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_carries_the_log_contract() -> None:
    """The table of tables is the one that schema.py prints; paste it anew when this fails."""
    begin, end = "<!-- log tables -->\n", "<!-- end of log tables -->"
    table = README[README.index(begin) + len(begin) : README.index(end)]
    assert table.strip() == markdown_table()


def test_the_loop_of_the_readme_runs(tmp_path: Path) -> None:
    """The five lines work as printed."""
    source = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert source is not None
    setting = {"__name__": "readme"}
    exec(
        "import numpy as np\n"
        "w1, w2 = np.ones((2, 2), np.float32), np.ones(2, np.float32)\n"
        "learning_rate = 0.1\n"
        "def forward_and_backward(step):\n"
        "    return 3.0, 2, {'w1': w1 * 0.5, 'w2': w2 * 0.5}\n"
        + source[1].replace("runs/mine", str(tmp_path / "mine")).replace("1000", "10"),
        setting,
    )
    assert (tmp_path / "mine" / "manifest.json").exists()
    assert (tmp_path / "mine" / "log" / "steps-r0-s0.arrows").stat().st_size > 0


def test_the_document_of_the_faults_has_every_fault() -> None:
    """One row of a table each, under its name."""
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    assert {fault.name for fault in FAULTS} == set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))


def test_every_link_of_the_documents_leads_somewhere() -> None:
    """Relative links of all documents name files that exist."""
    documents = [
        path for pattern in ("*.md", "docs/*.md", "experiments/*/*.md") for path in ROOT.glob(pattern)
    ]
    assert ROOT / "README.md" in documents
    for document in sorted(documents):
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (document.parent / target).exists(), f"{document.name}: {target}"

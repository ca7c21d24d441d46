"""What the shipped recall models were trained on: the task makers and the corpus still write it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = "83e1e97fa6b5bede"
"""A digest of some of their batches. Where it changes, the commands of tools/train_recall/README.md give other models
than those in assets/: keep the change out of what training reads, or train again."""
BATCHES = """
import sys
from hashlib import sha256
from pathlib import Path
from train_recall.corpus import KINDS
from train_recall.train import Documents, parse_mix, parse_weights
from train_recall.vocabulary import save_tokenizer

folder, digest = Path(sys.argv[1]), sha256()
save_tokenizer(folder)
for total, mix, short, steps in (
    (6000, "", "", range(0, 4)),
    (4000, "0=2048:1+8192:1", "", range(100, 108)),
    (5050, "0=256:2+512:4", "frequent_words:100", range(4500, 4502)),
):
    kinds = KINDS | parse_weights(short)
    batches = Documents(folder / "tokenizer.json", 1, steps, total, 65536, parse_mix(mix), kinds)
    for index in range(len(steps)):
        for part in batches[index]:
            digest.update(part.tobytes())
print(digest.hexdigest()[:16])
"""


def test_training_reads_what_the_shipped_models_read(tmp_path):
    command = [sys.executable, "-c", BATCHES, str(tmp_path)]
    path = f"{ROOT / 'tools'}:{ROOT / 'src'}"
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={"PYTHONPATH": path})
    assert done.stdout.strip() == SHIPPED

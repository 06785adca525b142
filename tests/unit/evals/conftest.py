"""Text that several tests of question answering plant facts in."""

import random

import pytest

WORDS = "kelp moss fern reed sedge rush thyme sage mint dill leek kale chard beet turnip radish".split()


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of 40 kB of lines with no digit, so that every number of a document was planted."""
    draw = random.Random(3)
    lines = [" ".join(draw.choices(WORDS, k=draw.randint(3, 12))) for _ in range(1000)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)

"""Words that need no network: compounds such as `amber-falcon` from two lists of our own, and made-up words.

No adjective ends with another and no noun starts with another, so that no compound of two lies within another one and
a string match cannot take one for the other.
"""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Iterator

ADJECTIVES = tuple(
    """
    amber ancient azure bitter blunt brave brisk broad calm candid clever cloudy coarse crimson crisp curly
    damp daring deaf dense distant dull dusty eager early elegant empty faint fierce flat fluffy foamy fragile frosty
    gentle giant glossy golden grim happy hasty hollow honest humble idle ivory jolly keen lavish lazy lively
    lonely loud lucid lunar marble mellow misty modest muddy narrow nimble noble opaque patient plain polite proud
    purple quick quiet rapid rough royal rusty sandy scarlet shallow sharp shy silent silver sleepy smooth solemn
    solid spicy steep stern stout sturdy subtle sunny swift tender tidy timid vivid warm wavy wild windy witty woven
    """.split()
)
NOUNS = tuple(
    """
    acorn anchor anvil apron arrow badger bakery balcony banner barrel basket beacon beaver bonfire bottle bramble
    bridge bucket button cabin camel candle canyon castle cavern cellar cherry chimney cinema circus clover comet
    compass copper coral cottage cradle cricket crystal curtain cushion dagger daisy desert dolphin donkey dragon
    drawer eagle ember engine falcon feather fern ferry fiddle flute forest fountain fox galaxy garden geyser ginger
    glacier goblet guitar hammer harbor harvest hedge helmet heron hill honey island jacket jaguar jigsaw journal
    jungle kettle kitten ladder lagoon lantern lemon lizard lobster magnet maple market meadow mirror monkey mountain
    mug needle nest novel oasis oboe olive orchard otter owl oyster paddle palace panther parrot pebble pencil pepper
    piano pigeon pillow planet pocket pony prairie puddle puzzle quarry rabbit raven ribbon river rocket saddle
    salmon satin scarf shovel siren spider spruce stable summit tablet temple thunder ticket tiger trumpet tulip
    tunnel turtle valley velvet village violin volcano wagon walnut walrus whistle willow window wizard zebra zipper
    """.split()
)

PAIRS = [f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS]
CONSONANTS, VOWELS = "bdjklmnrstvz", "aeiou"
FIVE_LETTERS = ["".join(parts) for parts in itertools.product(CONSONANTS, VOWELS, CONSONANTS, VOWELS, CONSONANTS)]


def compound_words(draw: random.Random, count: int) -> list[str]:
    """Return `count` different words of two parts."""
    return draw.sample(PAIRS, count)


def made_up_words(draw: random.Random) -> Iterator[str]:
    """Yield different pronounceable words in random order: all those of five letters, then those of seven.

    Words of one length lie in no other, and they take few tokens: long lists of them fit where compounds do not.
    """
    yield from draw.sample(FIVE_LETTERS, len(FIVE_LETTERS))
    seen = set()
    while True:
        word = draw.choice(CONSONANTS) + draw.choice(VOWELS) + draw.choice(FIVE_LETTERS)
        if word not in seen:
            seen.add(word)
            yield word


def uuid_text(draw: random.Random) -> str:
    """Return a random UUID (version 4), 36 characters."""
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def letters(draw: random.Random, count: int, size: int, alphabet: str) -> list[str]:
    """Return `count` different strings of `size` letters."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(draw.choices(alphabet, k=size))] = None
    return list(found)

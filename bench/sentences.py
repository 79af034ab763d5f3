"""English sentences from a small grammar, in which every pronoun is marked with the noun that it stands for.

A template is words and slots: `{a:animal}` is a noun of a class, `it>a` a pronoun that stands for slot a. A slot with
another number or class gives another sentence; nothing here is taken from a text.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

__all__ = ["Sentence", "is_held_back", "sentence", "winograd"]


def _words(text: str) -> list[str]:
    return text.split()


#: Classes of words that a slot may take.
WORDS = {
    "animal": _words(
        "animal cat dog horse cow sheep goat pig mouse rabbit fox wolf bear lion tiger elephant monkey donkey camel bird "
        "duck chicken goose eagle owl fish frog snake turtle spider bee deer squirrel hedgehog kitten puppy pony lamb"
    ),
    "man": _words(
        "man boy king father brother uncle son prince husband grandfather Tom Paul Peter John Mark David Sam Max"
    ),
    "woman": _words(
        "woman girl queen mother sister aunt daughter princess wife grandmother Anna Mary Lisa Eva Jane Sarah Laura Kate"
    ),
    "person": _words(
        "teacher doctor farmer driver student baker nurse artist singer writer neighbour friend soldier captain guest child "
        "tourist lawyer cook judge worker player painter scientist"
    ),
    "people": _words(
        "children people students teachers farmers friends guests boys girls men women parents players workers tourists"
    ),
    "animals": _words(
        "cats dogs horses cows sheep birds rabbits wolves lions monkeys ducks mice bears foxes kittens puppies"
    ),
    "place": _words(
        "street road river bridge field forest mountain hill valley desert lake park garden path square tunnel beach "
        "railway canal meadow yard swamp cave"
    ),
    "building": _words(
        "house school church shop hotel station castle museum library theatre hospital factory barn tower office kitchen"
    ),
    "thing": _words(
        "ball book box table chair lamp clock piano guitar picture ladder bicycle trophy statue vase bottle cup plate knife "
        "key phone camera radio computer hat coat shoe umbrella blanket pillow carpet mirror violin drum doll kite toy"
    ),
    "container": _words(
        "suitcase bag box drawer basket car room cupboard pocket shelf case cage trunk bucket envelope wagon"
    ),
    "food": _words(
        "apple bread cake soup cheese egg pizza salad rice meat carrot banana pie cookie sandwich potato meal fruit"
    ),
    "drink": _words("water milk tea coffee juice lemonade"),
    "vehicle": _words("car truck bus train boat ship plane tractor van taxi ambulance wagon"),
    "mood": _words(
        "tired hungry thirsty scared sleepy lazy ill weak afraid angry busy nervous lost bored sick exhausted shy frightened"
    ),
    "site": _words("wide long deep steep dangerous narrow dark wet muddy crowded noisy icy slippery flooded far rocky"),
    "large": _words("big large long wide tall heavy fat thick huge broad"),
    "small": _words("small narrow tiny tight short little full"),
    "taste": _words("hot cold salty sweet sour dry spicy bitter hard stale burnt"),
    "gloomy": _words("dark empty old closed dirty noisy crowded cold expensive ugly"),
    "inviting": _words("safe empty quiet short sunny open beautiful green warm"),
    "bold": _words("brave curious hungry strong fast clever happy awake young"),
    "colour": _words("red blue green yellow black white brown grey golden"),
    "quality": _words(
        "old new young small big little beautiful strange quiet happy sad famous kind clever strong slow fast rich poor"
    ),
    "moves": _words("walks runs sits sleeps waits stands jumps plays rests hides stops sings"),
    "move": _words("walk run sit sleep wait stand jump play rest hide stop sing"),
    "moved": _words("walked ran sat slept waited stood jumped played rested hid stopped sang"),
    "did": _words(
        "saw chased followed watched found liked heard met helped carried pushed visited loved feared remembered"
    ),
    "does": _words("sees chases follows watches finds likes hears meets helps carries pushes visits loves fears"),
    "made": _words("bought sold made broke cleaned painted opened closed lost found took brought dropped moved fixed"),
    "cross": _words("cross leave enter reach climb pass visit follow find like use"),
    "crossed": _words("crossed left entered reached climbed passed visited followed found liked used"),
    "where": _words("on in under near behind beside over across through into from at by"),
    "when": _words("yesterday today again slowly quickly quietly often never always now then together alone"),
    "why": _words("because since as"),
    "sound": _words("barked slept ate drank growled yawned"),
    "rolled": _words("rolled bounced broke shone burst vanished"),
    "det": _words("the a this that every one"),
    "dets": _words("the some these those many two three"),
}

#: A pronoun stands for one of two nouns, and the last word decides: pairs of (slot, class of the deciding word).
PAIRS = [
    ("The {a:animal} didn't {v:cross} the {b:place} {y:why} it>? was too {x} .", {"a": "mood", "b": "site"}),
    ("The {a:animal} {v:crossed} the {b:place} {y:why} it>? was {x} .", {"a": "bold", "b": "inviting"}),
    ("The {a:animal} did not {v:cross} the {b:building} {y:why} it>? looked {x} .", {"a": "mood", "b": "gloomy"}),
    ("The {a:thing} didn't fit into the {b:container} {y:why} it>? was too {x} .", {"a": "large", "b": "small"}),
    ("The {a:vehicle} couldn't pass the {b:place} {y:why} it>? was too {x} .", {"a": "large", "b": "site"}),
    ("The {a:animal} didn't eat the {b:food} {y:why} it>? was too {x} .", {"a": "mood", "b": "taste"}),
    ("The {a:animal} didn't drink the {b:drink} {y:why} it>? was too {x} .", {"a": "mood", "b": "taste"}),
    ("The {a:animal} saw the {b:thing} , and then it>? {x} .", {"a": "sound", "b": "rolled"}),
]

#: The form of the pronoun decides.
PRONOUNS = [
    "The {a:man} {d:did} the {b:woman} {y:why} he>a was {x:mood} .",
    "The {a:man} {d:did} the {b:woman} {y:why} she>b was {x:quality} .",
    "The {b:woman} {d:did} the {a:man} {y:why} she>b was {x:mood} .",
    "The {b:woman} {d:did} the {a:man} {y:why} he>a was {x:quality} .",
    "The {a:people} {d:did} the {b:animal} {y:why} they>a were {x:mood} .",
    "The {a:people} {d:did} the {b:animal} {y:why} it>b was {x:quality} .",
    "The {a:person} {d:did} the {b:animals} {y:why} they>b were {x:quality} .",
    "The {a:man} {m:made} his>a {t:thing} in the {p:building} .",
    "The {b:woman} {m:made} her>b {t:thing} {w:when} .",
    "The {a:people} {m:made} their>a {t:thing} in the {p:building} .",
    "The {a:animal} {v:moved} {r:where} the {p:place} . It>a was {x:mood} .",
    "The {a:man} {m:made} a {t:thing} . He>a was {x:quality} .",
    "{D:det} {b:woman} {v:moved} {r:where} the {p:building} , and she>b {d:did} the {n:animal} .",
    "The {t:thing} is {c:colour} , and it>t is {x:quality} .",
]

PLAIN = [
    "{D:det} {a:animal} {v:moved} {r:where} the {p:place} .",
    "{D:det} {a:animal} {v:moves} {r:where} the {p:place} {w:when} .",
    "The {a:animal} {v:moved} {r:where} the {t:thing} .",
    "{D:dets} {a:animals} {v:move} {r:where} the {p:place} .",
    "{D:dets} {a:people} {v:move} {r:where} the {p:building} {w:when} .",
    "{D:det} {q:quality} {a:person} {d:did} {E:det} {c:colour} {t:thing} .",
    "The {a:person} {d:does} the {b:animal} {r:where} the {p:place} .",
    "The {a:animal} that {d:did} the {b:animals} was {x:mood} .",
    "The {a:animals} that {d:did} the {b:animal} were {x:mood} .",
    "The {a:man} gave the {b:woman} a {c:colour} {t:thing} .",
    "The {b:woman} and the {a:man} {m:made} the {t:thing} {w:when} .",
    "There is a {c:colour} {t:thing} {r:where} the {p:building} .",
    "There are {D:dets} {a:animals} {r:where} the {p:place} .",
    "The {q:quality} {a:person} {m:made} a {t:thing} and some {f:food} .",
    "The {a:person} likes {k:drink} , but the {b:person} likes {l:drink} .",
    "The {t:thing} {r:where} the {p:building} is {q:quality} and {c:colour} .",
    "Every {a:person} {d:does} a {q:quality} {b:animal} .",
    "When the {a:animal} {v:moved} , the {b:person} {w:moved} too .",
    "Is the {a:animal} {r:where} the {t:thing} ?",
    "Yes , the {a:animal} is {r:where} the {t:thing} .",
]

_SLOT = re.compile(r"\{(\w+)(?::(\w+))?\}")
_ONSETS, _VOWELS = (
    _words("b d f g h k l m n p r s t v w z bl br cl dr fl gr kl pl pr sk sn st tr sh ch th qu j y"),
    "aeiou",
)
#: Classes whose words may be replaced by invented ones: the model must read an unknown noun from its place.
_INVENTED = ("animal", "person", "place", "thing", "building", "vehicle", "container", "food")


@dataclass(frozen=True)
class Sentence:
    """A text, and for every pronoun its place and the place of its noun: (start, end) of both in letters."""

    text: str
    references: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = ()
    #: Of a pair: where the noun is that the pronoun does not stand for.
    other: tuple[int, int] | None = None


def sentence(draw: random.Random) -> Sentence:
    """A sentence for training; pairs that are held back are drawn again."""
    share = draw.random()
    if share < 0.4:
        while True:
            template = draw.randrange(len(PAIRS))
            chosen = winograd(draw, template, invented=0.08)[draw.randrange(2)]
            if not is_held_back(chosen.text):
                return chosen
    return _filled(draw, draw.choice(PRONOUNS if share < 0.7 else PLAIN), {}, 0.08)


def winograd(draw: random.Random, template: int, invented: float = 0.0) -> tuple[Sentence, Sentence]:
    """Two sentences that differ in their last word, and so in what their pronoun stands for."""
    text, deciding = PAIRS[template]
    words = {name: _word(draw, kind, invented) for name, kind in _SLOT.findall(text) if kind}
    while words["a"] == words["b"]:
        words["b"] = _word(draw, dict(_SLOT.findall(text))["b"], invented)
    first, second = (
        _filled(draw, text.replace("it>?", f"it>{name}"), {**words, "x": draw.choice(WORDS[kind])}, 0.0, other)
        for (name, kind), other in zip(deciding.items(), "ba", strict=True)
    )
    return first, second


def is_held_back(text: str) -> bool:
    """Whether no sentence with these two nouns is trained on: one of ten pairs, chosen by their letters."""
    nouns = re.findall(r"\bthe (\w+)", text.lower())[:2]
    return sum(map(ord, "".join(nouns))) % 10 == 0


def _word(draw: random.Random, kind: str, invented: float) -> str:
    if kind in _INVENTED and draw.random() < invented:
        return "".join(draw.choice(_ONSETS) + draw.choice(_VOWELS) for _ in range(draw.randint(2, 3))) + draw.choice(
            "nrstlk"
        )
    return draw.choice(WORDS[kind])


def _filled(
    draw: random.Random, template: str, words: dict[str, str], invented: float, other: str | None = None
) -> Sentence:
    """The text of a template, word by word, with the places of its pronouns and their nouns."""
    text, nouns, pronouns = "", {}, []
    for part in template.split():
        slot, pronoun = _SLOT.fullmatch(part), part.partition(">")
        word = pronoun[0]
        if slot:
            word = words.get(slot[1]) or _word(draw, slot[2], invented)
        if word[0].isupper() and text.endswith(("The ", "the ")) and slot:  # a name has no article
            text = text[:-4]
        word = word if text and not text.endswith((". ", "? ")) else word[0].upper() + word[1:]
        text = text[:-1] if word in ".,?" else text
        place = len(text), len(text) + len(word)
        if slot:
            nouns[slot[1]] = place
        elif pronoun[1]:
            pronouns.append((place, pronoun[2]))
        text += word + " "
    references = tuple((place, nouns[name]) for place, name in pronouns)
    return Sentence(text.rstrip(), references, nouns[other] if other else None)

"""The built-in text: short tales, spelled out from a grammar of our own in whole numbers.

Each tale invents a town and three people, who keep their trade, their belonging and their place to
its end. What was said of them early tells what will be said later, so a longer context helps, and
names that no other tale has can be learned from the context alone.

Every choice is one step of a linear congruential generator, so the bytes are the same everywhere.
"""

from __future__ import annotations

import re
from functools import lru_cache

SIZE = 2**19

# A rule is a name and its alternatives. Here they are single words.
_WORDS = """
first: B Br C Cl D Dr F Fl G Gr H J K L M N P R S St T Th Tr V W
vowel: a e i o u ai ea ee o a e
middle: b d g l ld ll m mm n nd nn r rl rn s st t tt v
last: a an ar as e el en er et i ia in is o on or ow y
ending: bridge brook bury dale fell field ford ham haven hill low mere mouth ton wick
trade: baker carpenter clerk cook doctor farmer ferryman fisher gardener glazier joiner judge
    mason miller nurse painter pilot potter saddler sailor shepherd smith tailor teacher thatcher
    tinker warden weaver
noun: anchor apple axe barrel basket bell blanket boat book bottle bowl brick broom bucket button
    candle cart chair chest clock coat coin comb cradle cup drum feather fiddle flag flute gate
    glove hammer hat hinge hook horn jar jug kettle key ladder lamp lantern letter lock loom map
    mirror mug nail needle net oar oven paddle pan pen pillow pipe plate plough pot purse ring
    rope saddle sail saw scarf shell shoe shovel sieve spade spoon stool stove sword table thimble
    thread trunk umbrella wheel whistle
adjective: ancient blue borrowed bright broken brown carved cheap clean cold copper cracked
    crooked dark dusty empty fine green grey heavy hollow iron large light little long lost narrow
    new odd old painted pale patched plain polished red round rusty sharp silver simple small
    smooth square stolen strange striped thin tin ugly warm wet white wooden yellow
place: attic bakery barn bridge cellar chapel courtyard forest garden granary harbour inn kitchen
    library market meadow mill orchard quarry river school shed square stable tower well workshop
    yard
weather: fog frost hail rain sleet snow sunshine thunder wind
animal: cat cow crow dog donkey duck fox goat goose hare hen horse mouse owl pig sheep
season: autumn spring summer winter
number: two three four five six seven eight nine ten eleven twelve twenty forty
ordinal: second third fourth fifth sixth seventh eighth ninth tenth last
feeling: angry calm cheerful curious glad hungry patient proud quiet sad sorry tired uneasy
"""
# Here bars separate them, and a name in braces stands for one alternative of that rule.
_PHRASES = """
name: {first}{vowel}{middle}{last} | {first}{vowel}{middle}{vowel}{middle}{last}
look: {adjective}
manner: at once | by hand | carefully | in silence | in the end | once more | twice
its: {A}'s {A noun} | the {A look} {A noun} | {B}'s {B noun} | the {B look} {B noun}
    | {C}'s {C noun} | the {C look} {C noun}
there: the {A place} | the {B place} | the {C place} | the {place} | {town}
thing: a {noun} | a {adjective} {noun} | the {noun} | {number} {noun}s | {its} | {its}
when: before noon | that evening | in {season} | the next morning | after the {weather}
    | when the {weather} came | while the {animal} slept | on the {ordinal} day | not long after
    | {number} weeks later | as soon as {who} {did}
where: in {there} | near {there} | behind {there} | on the way to {there}
    | between the {place} and {town} | beside the {animal} | under the {noun}
    | not far from {there}
did: bought {thing} | sold {thing} to {other} | carried {thing} to {there} | found {thing} {where}
    | hid {its} {where} | looked for {its} | mended {its} {manner} | walked to {there}
    | came back from {there} | waited {where} | gave {thing} to {other}
    | asked {other} for {thing} | counted {number} {noun}s | followed the {animal} to {there}
    | dreamed of {thing} | left {there} {manner} | told {other} of {its} | washed {thing} {manner}
    | felt {feeling} | grew {feeling} | heard the {animal} {where} | opened the {noun} {manner}
say: I have seen {its} {where} | there is no {noun} like {its} | you may keep {thing}
    | nobody goes to {there} in {season} | {who} knows the way to {there}
    | the {animal} belongs to {other} | I would give {number} {noun}s for {its}
    | it is only the {weather} | we must find {other} before the {weather}
    | a {trade} needs {thing} | {other} was never {feeling} before | bring {its} to {there}
ask: where is {its} | who took {its} | did you see {other} {where} | why is {other} so {feeling}
    | what would a {trade} do with {thing} | is there {thing} {where}
line: {when}, {who} {did}. | {when}, {who} {did} and {did}. | {who} {did}. | {who} {did}.
    | {who} {did}, and {who} {did}. | {who} {did}, but {who} {did}.
    | {who} {did} because {who} {did}. | {A} and {B} {did} together. | {who} and {other} {did}.
    | if {who} {did}, nobody saw it. | {thing} lay {where}. | the {animal} {where} was {feeling}.
    | all of {town} {did}. | it was {season}, and there was {weather} {where}.
    | so {its} stayed {where}. | "{say}," said {other}.
    | "{say}," said {who} to {other}, "and {say}." | "{ask}?" asked {who}. "{say}," said {other}.
    | "{ask}?" {who} wanted to know.
opening: in {town} lived {A}, a {A trade}, who had a {A look} {A noun}.
    | this is the tale of {A}, the {A trade} of {town}, and of a {A look} {A noun}.
    | {A} was a {A trade} in {town} and owned nothing but a {A look} {A noun}.
    | every {trade} in {town} knew {A}, the {A trade} with the {A look} {A noun}.
meeting: {A} worked in the {A place}; {B} the {B trade} kept a {B look} {B noun} in the {B place}.
    | {B} was a {B trade} and had a {B look} {B noun} in the {B place}.
    | across the road lived {B}, the {B trade}, with a {B look} {B noun}.
third: then came {C}, a {C trade} from far away, with a {C look} {C noun}.
    | {C}, a {C trade}, brought a {C look} {C noun} to the {C place}.
    | the third of them was {C} the {C trade}, whose {C noun} was {C look}.
closing: and {A} still has the {A look} {A noun}. | that is why {town} remembers {A}, {B} and {C}.
    | since then {its} has been {where}.
    | {A} the {A trade} and {B} the {B trade} were friends ever after.
"""


def _rules(grammar: str, bar: str | None) -> dict[str, list[str]]:
    """Alternatives of each rule, by its name; an indented line goes on with the one before."""
    rules = (line.split(":", 1) for line in re.sub(r"\n +", " ", grammar.strip()).splitlines())
    return {name: [each.strip() for each in body.split(bar)] for name, body in rules}


_RULES = _rules(_WORDS, None) | _rules(_PHRASES, "|")
# The constants are those of Knuth's MMIX; the state begins at 1.
_MULTIPLIER, _INCREMENT = 6364136223846793005, 1442695040888963407


class _Teller:
    """Expands rules. ``facts`` are the words that stay the same to the end of a tale.

    ``{who}`` is one of the three people, by name or by trade; ``{other}`` is one of the two others.
    """

    def __init__(self) -> None:
        self.state, self.facts, self.subject = 1, dict[str, str](), "A"

    def below(self, count: int) -> int:
        """A number below ``count``, from the high bits: the low ones of such a generator repeat."""
        self.state = (self.state * _MULTIPLIER + _INCREMENT) % 2**64
        return (self.state >> 33) % count

    def expand(self, name: str) -> str:
        """The fact of that name, or one alternative of the rule, with all that stands in it."""
        if name == "who":
            self.subject = "ABC"[self.below(3)]
            name = (self.subject, f"{self.subject} title")[self.below(2)]
        elif name == "other":
            name = "ABC".replace(self.subject, "")[self.below(2)]
        if name in self.facts:
            return self.facts[name]
        chosen = _RULES[name][self.below(len(_RULES[name]))]
        return re.sub(r"\{([\w ]+)\}", lambda slot: self.expand(slot[1]), chosen)

    def sentence(self, rule: str) -> str:
        """One sentence, with its capital letters and articles put right."""
        said = re.sub(r"\ba (?=[aeiou])", "an ", self.expand(rule))
        return re.sub(r'(^"?|[.?] "?)([a-z])', lambda at: at[1] + at[2].upper(), said)

    def tale(self) -> str:
        """Paragraphs about one town and three people."""
        self.facts = {}
        facts = {"town": self.expand("name") + self.expand("ending")}
        for person in "ABC":
            facts[person] = self.expand("name")
            for what in ("trade", "look", "noun", "place"):
                facts[f"{person} {what}"] = self.expand(what)
            facts[f"{person} title"] = f"the {facts[f'{person} trade']}"
        self.facts = facts
        said = [self.sentence("opening"), self.sentence("meeting"), self.sentence("third")]
        paragraphs = [" ".join(said)]
        for _ in range(3 + self.below(4)):
            paragraphs.append(" ".join(self.sentence("line") for _ in range(2 + self.below(4))))
        return "\n".join([*paragraphs, self.sentence("closing")]) + "\n\n"


@lru_cache(maxsize=1)
def tales() -> bytes:
    """The first :data:`SIZE` bytes of one tale after another; plain ASCII.

    Examples:
        >>> len(tales())
        524288
    """
    teller, told, length = _Teller(), list[str](), 0
    while length < SIZE:
        told.append(teller.tale())
        length += len(told[-1])
    return "".join(told)[:SIZE].encode("ascii")

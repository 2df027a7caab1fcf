"""Seeded mutations of files, for the fuzz tests."""

from __future__ import annotations

import itertools
import pickletools
import random
import struct

_PIECES = [
    *(
        b"(",
        b"0",
        b"1",
        b"2",
        b"N",
        b"R",
        b"b",
        b"o",
        b"a",
        b"e",
        b"s",
        b"u",
        b"d",
        b"l",
        b"t",
        b"}",
        b"]",
        b")",
    ),
    *(bytes([c]) for c in b"\x81\x85\x86\x87\x88\x90\x91\x92\x93\x94"),
    *(b"cposix\nsystem\n", b"cbuiltins\neval\n", b"cpathlib\nPosixPath\n", b"ccollections\nOrderedDict\n"),
    *(b"ctorch.distributed.checkpoint.metadata\nMetadata\n", b"iposix\nsystem\n", b"X\x04\x00\x00\x00true"),
    *(b"X\x0b\x00\x00\x00/etc/passwd", b"X\x04\x00\x00\x00name", b"X\x06\x00\x00\x00values"),
    *(
        b"h\x00",
        b"h\x07",
        b"q\x00",
        b"q\x07",
        b"K\x00",
        b"K\xff",
        b"J\xff\xff\xff\xff",
        b"\x8a\x09" + b"\xff" * 9,
    ),
    *(b"}X\x04\x00\x00\x00nameX\x01\x00\x00\x00xs\x86b", b"N}X\x01\x00\x00\x00xK\x01s\x86b", b")R", b"(tR"),
    b")" + b"\x85" * 5000,
    b"(" * 5000,
]


_WORDS = ["null", "-1", "1e999", "[]", "{}", "9" * 400, "&a [*a]", "59:59:59.5", "\u0085", "\x1b[2J", '"']


def mutate_pickle(data: bytes, chance: random.Random) -> bytes:
    """Insert, delete, repeat, swap or replace some opcodes, anywhere."""
    positions = [position for _, _, position in pickletools.genops(data)] + [len(data)]
    opcodes = [data[a:b] for a, b in itertools.pairwise(positions)]
    for _ in range(chance.choice([1, 1, 2, 3, 8])):
        place, second = chance.randrange(len(opcodes)), chance.randrange(len(opcodes))
        action = chance.randrange(6)
        if action == 0:
            opcodes.insert(place, chance.choice(_PIECES))
        elif action == 1:
            del opcodes[place]
        elif action == 2:
            opcodes[place], opcodes[second] = opcodes[second], opcodes[place]
        elif action == 3:
            opcodes[place] = chance.choice(_PIECES)
        elif action == 4:
            opcodes.insert(place, opcodes[second])
        else:
            opcodes[place] = mutate_bytes(opcodes[place], chance)
    return b"".join(opcodes)


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """Flip bits, overwrite numbers, cut or repeat a part."""
    mutated = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 5])):
        if not mutated:
            break
        place, action = chance.randrange(len(mutated)), chance.randrange(5)
        if action <= 1:
            mutated[place] ^= 1 << chance.randrange(8)
        elif action == 2:
            number = chance.choice([0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1])
            mutated[place : place + 8] = struct.pack("<Q", number)[: len(mutated) - place]
        elif action == 3:
            del mutated[place : place + chance.randrange(1, 64)]
        else:
            part = mutated[place : place + chance.randrange(1, 64)]
            mutated[place:place] = part
    return bytes(mutated)


def mutate_text(text: str, chance: random.Random) -> str:
    """Replace or insert words that parsers treat specially."""
    words = text.split(" ")
    for _ in range(chance.choice([1, 2, 4])):
        word = chance.choice(
            [
                "null",
                "-1",
                "1e999",
                "[]",
                "{}",
                "9" * 400,
                "&a [*a]",
                "59:59:59.5",
                "\u0085",
                "\x1b[2J",
                '"',
                "!!x",
                "~",
            ]
        )
        place = chance.randrange(len(words) + 1)
        words[place : place + chance.randrange(2)] = [word]
    return " ".join(words)

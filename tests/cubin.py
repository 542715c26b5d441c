"""What CUDA kernels need of a multiprocessor, read from their machine code (an ELF file)."""

import struct

REGISTERS, STACK = 0x2F, 0x11  # numbers of attributes in the section .nv.info
SIZED = 4  # the format of an attribute that says how long it is


def sections(code):
    """Yield the name and the bytes of each section."""
    (start,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names = struct.unpack_from("<HHH", code, 0x3A)
    heads = [struct.unpack_from("<IIQQQQIIQQ", code, start + k * size) for k in range(count)]
    texts = heads[names][4]
    for head in heads:
        first = texts + head[0]
        yield code[first : code.index(b"\0", first)].decode(), code[head[4] : head[4] + head[5]]


def symbols(code):
    """Return the names of the symbols."""
    found = dict(sections(code))
    table, texts = found[".symtab"], found[".strtab"]
    firsts = [struct.unpack_from("<I", table, k)[0] for k in range(0, len(table), 24)]
    return [texts[first : texts.index(b"\0", first)].decode() for first in firsts]


def resources(code):
    """Return for each kernel how many registers a thread has, and how many bytes of stack."""
    info, names = dict(sections(code))[".nv.info"], symbols(code)
    kernels, place = {}, 0
    while place < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, place)
        place += 4
        if form == SIZED:
            if attribute in (REGISTERS, STACK):
                symbol, value = struct.unpack_from("<II", info, place)
                key = "registers" if attribute == REGISTERS else "stack"
                kernels.setdefault(names[symbol], {})[key] = value
            place += size
    return kernels

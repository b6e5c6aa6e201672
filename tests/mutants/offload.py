"""What may go wrong in the functions of lessons.offload."""

MUTANTS = {
    "cut": [
        ("room == 0", "room <= 1"),                                 # chunks that are not full
        ("while start < size", "if start < size"),                  # only the first part of each
        ("while start < size", "while start < size - 1"),           # the last number is left out
        ("min(size, start + room)", "start + room"),                # beyond the array
        ("room -= stop - start", "room = 0"),                       # a chunk for each array
        ("room -= stop - start", "pass"),                           # chunks that grow
        ("(i, start, stop)", "(i, 0, stop)"),                       # from the array's start
        ("(i, start, stop)", "(i, start, stop - start)"),           # a length, not an end
        ("start = stop", "start = stop + 1"),                       # one number lost at each border
        ("room = most", "room = most + 1"),
    ],
    "pass_by": [
        ("1 - i % 2", "i % 2"),                                     # one buffer for both
        ("coming.result()", "pass"),                                # updated before it is here
        ("chunks[i + 1], other", "chunks[i + 1], mine"),
        ("submit(put, chunk, mine)", "submit(put, chunk, other)"),
        ("submit(put, chunk, mine)", "submit(get, chunk, mine)"),   # never taken back
        ("chunks[i + 1], other)\n        yield chunk, mine",
         "chunks[i], other)\n        yield chunk, mine"),          # the same one again
        ("        done.result()", "        pass"),                  # the last is still on its way
        ("for done in going:", "for done in going[:1]:"),
        ("going.append(submit(put, chunk, mine))", "submit(put, chunk, mine).result()"),
        ("        yield chunk, mine\n        going.append(submit(put, chunk, mine))",
         "        going.append(submit(put, chunk, mine))\n        yield chunk, mine"),
        ("going.append(submit(put, chunk, mine))",                  # errors of others are lost
         "going = [submit(put, chunk, mine)]"),
        ("yield chunk, mine", "yield chunk, other"),
        ("enumerate(chunks):", "enumerate(chunks[:-1]):"),          # the last one is left out
    ],
}

RIGHT = {
    "cut": [("min(size, start + room)", "start + min(room, size - start)")],
    "pass_by": [("for done in going:\n        done.result()", "[done.result() for done in going]")],
}

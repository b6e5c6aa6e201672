"""Let a trained model write on: from a checkpoint alone, whatever it was trained on.

    index.json -> sizes of the model, characters of its text      tensors -> a plain model
    prompt -> ids -> generate, one character after the other -> text

One rank writes; a checkpoint that four ranks of tensor parallelism saved is a plain model here.

Run:    python -m minidist.sample --from out --prompt "latin "
Lesson: python -m lessons.checkpoint
"""
from types import SimpleNamespace

import numpy as np

from minidist import BadInput, checkpoint, flags, models, parallel
from minidist.engine.data import Alphabet
from minidist.engine.gpt import generate
from minidist.ranks import launch


def parser():
    p = flags.Parser(prog="python -m minidist.sample", description=__doc__.split("\n")[0],
                     epilog='example: python -m minidist.sample --from out --prompt "latin "')
    p.add_argument("--from", dest="folder", default="out", metavar="DIR",
                   help="a checkpoint, or a directory of them: the latest (default out)")
    p.add_argument("--prompt", default="\n", metavar="TEXT", help="what to go on from (a new line)")
    p.add_argument("--length", type=flags.integer(0), default=200, metavar="N",
                   help="characters to add (default 200)")
    p.add_argument("--seed", type=flags.integer(0), default=0, metavar="S", help="default 0")
    return p


def restore(found):
    """Make the plain model that a checkpoint holds.  -> model, Alphabet"""
    about = found.index["about"]
    if "flags" not in about:
        raise BadInput(f"{found.path} was not saved by minidist.train, so it does not say what "
                       "model it is of")
    o, alphabet = SimpleNamespace(**about["flags"]), Alphabet(about["characters"])
    model = models.plain(o, models.configure(o, alphabet.vocab))
    checkpoint.load(found, model)
    return model, alphabet


def write_on(model, alphabet, prompt, length, seed):
    """Continue the prompt.  -> the whole text"""
    start = alphabet.encode(prompt) or [0]
    ids = generate(model, start, length, np.random.default_rng([seed, 1]))
    return prompt + alphabet.decode(ids[len(start):])


def main():
    o, world = parser().parse_args(), parallel.running()
    model, alphabet = restore(checkpoint.find(o.folder, world))
    text = write_on(model, alphabet, o.prompt, o.length, o.seed)
    if world.rank == 0:
        print(text)


if __name__ == "__main__":
    launch.run(main)

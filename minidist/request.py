"""Request: what a planner is asked, from flags to a model, a batch, and a card.

    --model gpt3 --tokens 3e6 --cards 1024 --card h100 --network 25    ->  Job, Card
    --preset mini --batch 8 --card here.json                           ->  Job, Machine

Run:    python -m minidist.plan --help
Lesson: python -m lessons.plan
"""
from dataclasses import replace

from minidist import BadInput, flags, machine
from minidist.engine import gpt
from minidist.engine.data import Corpus, default_text
from minidist.estimate import CARDS, Job

MODELS = {
    "gpt3": Job(L=96, D=12288, H=96, V=50257, T=2048, B=1536),
    "llama3-8b": Job(L=32, D=4096, H=32, K=8, V=128256, T=8192, B=512, count=8.03e9),
    "llama3-70b": Job(L=80, D=8192, H=64, K=8, V=128256, T=8192, B=1024, count=70.55e9),
    "llama3-405b": Job(L=126, D=16384, H=128, K=8, V=128256, T=8192, B=2048, count=405.85e9),
    "deepseek-v3": Job(L=61, D=7168, H=128, V=129280, T=4096, B=15360, count=671.03e9,
                       active=37.55e9, experts=58 * 256 * 3 * 7168 * 2048, k=8,
                       wide=128 * (192 + 128) // 2)}
OVERRIDES = [("memory", "GB", "replace the card's"), ("flops", "TFLOP/s", "of its products"),
             ("node-link", "GB/s", "inside a node, each way"),
             ("network", "GB/s", "between nodes, for each card")]


def parser():
    p = flags.Parser(prog="python -m minidist.plan",
                     description="Plan: which techniques train a model on given cards.",
                     epilog="example: python -m minidist.plan --model gpt3 --cards 1024")
    add_model(p.add_argument_group("model"))
    add_cards(p.add_argument_group("cards"))
    p.add_argument("--published", action="store_true",
                   help="show the estimate beside steps that were measured and published")
    p.add_argument("--calibrate", metavar="FILE",
                   help="measure this machine, --cards ranks at once (default 2), and write it")
    p.add_argument("--try", dest="tried", action="store_true",
                   help="on a machine that was measured: take steps of each kind of plan, too")
    p.add_argument("--json", metavar="FILE", help="write the plans as data")
    return p


def add_model(p):
    p.add_argument("--model", choices=MODELS, help="sizes of a published one")
    p.add_argument("--preset", choices=gpt.PRESETS, help="or one of minidist")
    p.add_argument("--params", type=flags.real(1e6), metavar="N",
                   help="or a GPT of about N parameters (7e9), 128 times as wide as it has layers")
    for name, text in (("layers", "L"), ("width", "D"), ("heads", "H"), ("vocab", "V"),
                       ("context", "T")):
        p.add_argument("--" + name, type=flags.integer(1, 10 ** 7), metavar=text,
                       help="replace the model's")
    p.add_argument("--batch", type=flags.integer(1), metavar="B", help="rows in a step")
    p.add_argument("--tokens", type=flags.real(1), metavar="N", help="or tokens (16e6)")


def add_cards(p):
    p.add_argument("--cards", type=flags.integer(1, 10 ** 6), metavar="N", help="how many")
    p.add_argument("--card", default="a100", metavar="CARD",
                   help=f"{', '.join(CARDS)} (default a100, with 80 GB), or what --calibrate wrote")
    for name, unit, text in OVERRIDES:
        p.add_argument(f"--{name}", type=flags.real(1e-3), metavar=unit, help=text)
    p.add_argument("--per-node", type=flags.integer(1, 1024), metavar="N",
                   help="cards on the fast link (default 8)")


def model(args):
    """Read which model it is about.  -> Job on one card; BadInput"""
    named = args.model or args.preset or args.params
    if [bool(args.model), bool(args.preset), bool(args.params),
            bool(args.layers and args.width and not named)].count(True) != 1:
        raise BadInput("say which model: --model gpt3, --preset mini, --params 7e9, or --layers "
                       "and --width; one of them")
    job = plain(args)
    given = {"L": args.layers, "D": args.width, "H": args.heads, "V": args.vocab,
             "T": args.context, "B": args.batch}
    changed = {name: value for name, value in given.items() if value}
    if changed.keys() & {"L", "D", "V"}:
        if job.experts:
            raise BadInput(f"--layers, --width and --vocab change what is known of {args.model}'s "
                           "experts; leave them out, or choose a model without experts")
        changed["count"] = 0
    job = replace(job, **changed)
    if args.tokens:
        job = replace(job, B=max(1, round(args.tokens / job.T)))
    if job.D % job.H and not job.wide:
        raise BadInput(f"{job.H} heads do not divide a width of {job.D}; use other --heads")
    return job if job.K == 0 or job.H % job.K == 0 else replace(job, K=0)


def plain(args):
    """The model as it is known by name, or a GPT of usual proportions.  -> Job"""
    if args.model:
        return MODELS[args.model]
    if args.preset:
        size = gpt.sizes(args.preset)
        vocab = Corpus(default_text(), size["context"]).vocab
        return Job(size["layers"], size["width"], size["heads"], vocab, size["context"], 8)
    layers = args.layers or max(1, round((args.params / 12 / 128 ** 2) ** (1 / 3)))
    width = args.width or 128 * layers
    return Job(layers, width, max(1, width // 128), 50257, 2048, 512)


def card(args):
    """Read which card it is about.  -> Card, or Machine; BadInput"""
    found = CARDS.get(args.card) or machine.read(args.card)
    given = {"memory": args.memory and args.memory * 1e9, "peak": args.flops and args.flops * 1e12,
             "node": args.node_link and args.node_link * 1e9,
             "network": args.network and args.network * 1e9, "per_node": args.per_node}
    given = {name: value for name, value in given.items() if value}
    if args.card not in CARDS and given.keys() - {"memory"}:
        raise BadInput(f"{args.card} was measured; only --memory can replace what it says")
    return replace(found, **given)

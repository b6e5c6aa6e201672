"""A hint for each function of the exercises: `python -m lessons.ring --hint all_gather`.

It says what to think of first, and what goes wrong most often; it never gives a line of the body.
"""
from minidist import BadInput

HINTS = {
    "walls": {
        "linear_work": "A product and a sum are two flops, and the bias adds one for each result. "
        "Four things cross the memory once: what comes in, weights, bias, what goes out.",
        "attention_work": "The lesson's `tiles` counts the pairs of tokens that are computed. "
        "Each of the two products takes two flops for each pair and each of the D numbers.",
        "at_least": "Two clocks run at once. Which of them is the later one?"},
    "step": {
        "layer_norm": "Write u = (x - mean) / std first. Of g w, the gradient keeps all but two "
        "things: its mean, and its share along u. Nothing may overwrite g.",
        "gelu": "Forward knows all that the derivative needs. Backward may only multiply."},
    "memory": {
        "held": "Four classes, each from one helper of the module. What a parameter shares with "
        "another owner counts elsewhere; the graph must not count what the model holds."},
    "collectives": {
        "broadcast": "`place_in_tree` gives your place, counted from the root, and the bit that "
        "joins you to your parent. Your children hang on the smaller bits, largest first.",
        "reduce": "A broadcast backwards: smallest bit first, children before the parent. What "
        "comes in needs room of x's own dtype.",
        "pairwise": "Your own piece takes no message. `partners` names, round by round, whom to "
        "send to and whom to hear from; hand all moves over together."},
    "ring": {
        "reduce_scatter": "Everybody sends to the right and hears from the left, p - 1 times. The "
        "chunk that you send is the one that you have just added to. Python's indices may be < 0.",
        "all_gather": "The same walk, without a sum: which chunk have you just received?",
        "all_reduce": "Two functions that you have written, over the same cut of x."},
    "mesh": {
        "coordinates": "The last axis is the fastest: divide with remainder from the right. Give "
        "plain integers.",
        "groups": "Put all ranks into an array with one dimension for each axis, and bring the "
        "axes that vary to the end."},
    "dp": {
        "share_rows": "`batch.split` makes the pieces; a function in model.localizers is called "
        "with each batch. Logits alone (no targets) are wanted whole.",
        "start_equal": "Not the world's rank 0: the first of those who hold the same piece. "
        "`alike_in` finds that group.",
        "assign": "A bucket closes when what is in it has reached its limit; the limit is `first` "
        "for a kind's first bucket. What must not mix waits in buckets of its own.",
        "finalize": "Sums first, one division at the end. All ranks must agree on who takes part "
        "before they sum: a gradient may be None here and not there."},
    "zero": {
        "attach": "An optimizer asks `target` for two arrays: what to write, and its gradient. "
        "Give views of my piece; with stage 3 the data is the piece already.",
        "gather_updated": "My piece of each parameter goes out, all parameters are filled, in one "
        "call. A parameter whose data has changed wants to be told.",
        "keep_sum": "The bucket hands the row out as gradients. Whatever was kept by an earlier "
        "pass is added to, not replaced; nothing stays in p.grad.",
        "send_for": "One message carries one dtype. All ranks must go through dtypes in one order.",
        "free": "The whole array lives as long as somebody holds it."},
    "recompute": {
        "checkpoint": "Forward must leave no graph behind, only inputs and the state of the "
        "generator. Backward computes again on inputs cut off from their past, and returns a "
        "gradient for each leaf of that new graph."},
    "offload": {
        "cut": "Walk through the arrays with the room left in the chunk that is open. Empty arrays "
        "leave no trace; no chunk is empty.",
        "pass_by": "Before you hand a chunk out, start to get the next one into the other buffer: "
        "requests run in the order submitted, so it waits for the put from there."},
    "precision": {
        "to_bfloat16": "Look at the bits as integers. Adding just under half of the last kept bit "
        "carries by itself; ties need one more where that bit is odd. NaN must not carry.",
        "moved": "Overflow: count down, and halve when nothing is left, and at each one after it. "
        "Clean steps count up to the window; only a full window restores the hysteresis.",
        "update": "Sum, look for overflow on all ranks, then norm and clipping in true units: "
        "one factor brings the sum of scaled gradients to the mean. The scale moves last."},
    "compress": {
        "feedback": "What goes out is the gradient and the rest together; the new rest is that, "
        "less my share of the sum. The caller still needs x.",
        "merged": "A scatter that adds: two ranks may name the same place."},
    "tp": {
        "copy_to": "Nothing to do forward. Each rank did something else with x: what is the "
        "gradient of a sum?",
        "reduce_from": "The opposite of copy_to: the message is forward's, and backward has none.",
        "vocab_parallel_cross_entropy": "Three all_reduces: a max, the target's logit, a sum of "
        "exponentials. Only the owner of the target knows its logit. Backward needs no message."},
    "sp": {
        "all_gather": "If forward gathers and every rank goes on in its own way, backward sums and "
        "keeps a piece. Pieces may differ in length.",
        "reduce_scatter": "The opposite of all_gather, with the same sizes.",
        "all_gather_linear": "Keep the piece, not the whole. In backward the weight's gradient "
        "needs the whole x, and x's gradient is a partial sum."},
    "flash": {
        "merge": "With w = exp(lse), both results are means weighed by w. Work with differences of "
        "lse: exp(10000) is none. Two sets that nobody sees must not give NaN."},
    "cp": {
        "forward": "Start the hop before you compute, and wait for it after. At step s the keys "
        "here are those of rank (rank - s). The last keys go nowhere.",
        "backward": "Keys travel as in forward, and their gradient with them, one hop behind; it "
        "ends at home, where your own share waits."},
    "ulysses": {
        "to_heads": "One all_to_all: which dimension is cut apart, and which is put together?",
        "to_tokens": "The same exchange with the two dimensions in each other's place."},
    "pp": {
        "one_f_one_b": "The last rank can go back at once; each rank before it needs one more "
        "forward first. There may be fewer micro-batches than that.",
        "act": "Four kinds: F computes, B goes back, I goes back but puts weights off into a list "
        "of its own, W runs that list and forgets it."},
    "schedules": {
        "interleaved": "Write down the order of (micro-batch, chunk) in forward first: a round of "
        "micro-batches through chunk 0, then chunk 1. Backward takes chunks from the last.",
        "zb_h1": "1F1B, with I for B. Then count how many I's each rank may be ahead of its W's."},
    "moe": {
        "route": "The bias chooses, and is gone then. Gates come from the probabilities, through "
        "operations that have gradients.",
        "balance_loss": "f counts, P has the gradient. Uniform routing must give the coefficient.",
        "expert_order": "A stable sort of all choices by expert, with the dropped ones behind the "
        "last. Then say for each choice where it has gone.",
        "to_tokens": "A choice that was dropped adds nothing and gets no gradient. A gate's "
        "gradient is a dot product along D."},
    "ep": {
        "exchange_counts": "One integer for each pair of rank and expert. Which of your counts "
        "does rank r need?",
        "dispatch": "Rows leave in order of experts, so those for one rank lie together; they "
        "arrive in order of senders, and must be sorted by expert.",
        "combine": "Undo the sorting, then swap what was sent and what came."},
    "plan": {
        "held": "Which of P, G, O does each stage of ZeRO cut? A first stage keeps as many "
        "micro-batches as there are stages, if there are as many; interleaving adds to it.",
        "bubble": "Idle over working time: the sum of both is not what is asked for.",
        "sent_to_replicas": "An all_reduce is a reduce_scatter of gradients and an all_gather; "
        "ZeRO gathers parameters, which have 2 bytes. Which of its stages send in every pass?"},
    "rates": {
        "zero_memory": "Stage 1 cuts the optimizer's state, 2 the gradients too, 3 the parameters: "
        "which of three numbers is divided by p from which stage on?",
        "compressed": "Go through `send` of each form and write down its messages: what is summed, "
        "what is gathered, how many bytes each number has. The flags always travel."},
    "checkpoint": {
        "slots": "What the optimizer writes, under the parameter's name, then its moments, zero "
        "where there was no update yet.",
        "fill": "`lay` cuts my part of the global tensor. What is there must be written in place, "
        "and may have another shape, or padding behind it.",
        "commit": "Everything must be on the disk before the rename, and the rename before "
        "`latest`. Ask of each line: if the power goes here, what does a reader find?"},
}


def show(lesson, function):
    """Say the hint for one function of a lesson's exercise, or for all of them ("")."""
    of = HINTS.get(lesson.script.name, {})
    for name in [function] if function else of:
        lesson.fill(f"{name}: {of[name]}", "  ")


def check(script, function):
    """Refuse a name that is no function of the exercise.  BadInput"""
    names = [f.__name__ for f in script.exercise]
    if function and function not in names:
        raise BadInput(f"lessons.{script.name} has no function {function!r} to write; "
                       f"its exercise: {', '.join(names) or 'none'}")

"""Mutants of the functions of lessons.plan."""
MUTANTS = {
    "held": [
        ("job.parameters / (job.tp * job.pp), state", "job.parameters / job.tp, state"),
        ("job.parameters / (job.tp * job.pp), state", "job.parameters / job.pp, state"),
        ("for stage in (3, 2, 1)", "for stage in (1, 2, 3)"),
        ("job.zero >= stage", "job.zero == stage"),
        ("1 / job.dp if", "1 / job.cards if"),
        ("job.sizes, job.tp, job.sp, job.again", "job.sizes, 1, job.sp, job.again"),
        ("job.sizes, job.tp, job.sp, job.again", "job.sizes, job.tp, False, job.again"),
        ("job.sizes, job.tp, job.sp, job.again", "job.sizes, job.tp, job.sp, None"),
        ("min(job.pp, job.microbatches)", "job.pp"),
        ("min(job.pp, job.microbatches)", "job.microbatches"),
        ("* (job.v > 1)", ""),
        ("job.L / job.pp * layer * alive", "job.L / job.pp * layer"),
        ("* (job.pp == 1)", ""),
        ("2 * mine / job.L * (job.zero == 3)", "0")],
    "bubble": [
        ("job.pp - 1", "job.pp"),
        ("(job.v * job.microbatches)", "job.microbatches"),
        ("(job.v * job.microbatches)", "job.v"),
        ("(job.v * job.microbatches)", "(job.v * job.microbatches + job.pp - 1)"),
        ("(job.v * job.microbatches)", "(job.v * job.B)"),
        ("(job.pp - 1)", "(job.pp - 1) // job.pp")],
    "sent_to_replicas": [
        ("(job.dp - 1) / job.dp", "1"),
        ("(job.dp - 1) / job.dp", "1 / job.dp"),
        ("job.parameters / (job.tp * job.pp)", "job.parameters"),
        ("job.parameters / (job.tp * job.pp)", "job.parameters / job.tp"),
        ("(2 + 2 + 4)", "(2 + 4)"),
        ("job.microbatches * (2 + 2 + 4)", "(2 + 2 + 4)"),
        ("2 * 4 if job.zero == 0 else 4 + 2", "2 * 4"),
        ("2 * 4 if job.zero == 0", "4 if job.zero == 0"),
        ("job.microbatches if job.zero == 2 else 1", "1")],
}
RIGHT = {
    "bubble": [("(job.pp - 1) / (job.v * job.microbatches)",
                "(job.pp - 1) / job.v / job.microbatches")],
    "sent_to_replicas": [("(job.dp - 1) / job.dp", "1 - 1 / job.dp")],
}

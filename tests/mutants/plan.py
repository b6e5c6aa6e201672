"""Mutants of the functions of lessons.plan."""
MUTANTS = {
    "held": [
        ("mine, (p, g, o) = job.mine", "mine, (p, g, o) = job.divided"),
        ("mine, (p, g, o) = job.mine", "mine, (p, g, o) = job.parameters"),
        ("for stage in (3, 2, 1)", "for stage in (1, 2, 3)"),
        ("job.zero >= stage", "job.zero == stage"),
        ("job.divided / mine if", "1 / job.dp if"),
        ("job.sizes, job.tp, job.sp,", "job.sizes, 1, job.sp,"),
        ("job.sizes, job.tp, job.sp,", "job.sizes, job.tp, False,"),
        ("job.again or (job", "None or (job"),
        ("min(job.pp, job.microbatches)", "job.pp"),
        ("min(job.pp, job.microbatches)", "job.microbatches"),
        ("* (job.v > 1)", ""),
        ("job.layers * layer * alive", "job.layers * layer"),
        ("+ one + words) / job.cp", "+ one + words)"),
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
        ("job.mine - job.divided", "job.mine"),
        ("job.mine - job.divided", "job.divided"),
        ("job.mine - job.divided", "job.parameters - job.divided"),
        ("job.mine - job.divided", "job.mine * (1 - 1 / job.dp)"),
        ("(2 + 2 + 4)", "(2 + 4)"),
        ("job.microbatches * (2 + 2 + 4)", "(2 + 2 + 4)"),
        ("2 * 4 if job.zero == 0 else 4 + 2", "2 * 4"),
        ("2 * 4 if job.zero == 0", "4 if job.zero == 0"),
        ("job.microbatches if job.zero == 2 else 1", "1")],
}
RIGHT = {
    "bubble": [("(job.pp - 1) / (job.v * job.microbatches)",
                "(job.pp - 1) / job.v / job.microbatches")],
    "sent_to_replicas": [("job.mine - job.divided", "job.mine * (1 - job.divided / job.mine)")],
}

"""The closed forms, against the table that every text book has, and against each other."""
import pytest

from minidist import cost

S, RANKS = 48 * 1000, (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 33, 64)
POWERS = (1, 2, 4, 8, 16, 64)


def all_ranks(algorithm, p, n=S, itemsize=1):
    return [cost.all_reduce(algorithm, p, n, itemsize, r) for r in range(p)]


def log2(p):
    return p.bit_length() - 1


def test_ring_sends_twice_the_vector_however_many_ranks():
    for p in 2, 3, 4, 5, 8, 16:
        for price in all_ranks("ring", p, n=720720):
            assert price == (2 * (p - 1), 2 * (p - 1), 2 * (p - 1) * 720720 // p)


@pytest.mark.parametrize("n", [0, 1, 3, 5, 1003])
def test_ring_with_uneven_chunks(n):
    """All but its own chunk on the way to the sum, all but its neighbour's on the way back."""
    for p in RANKS:
        c = cost.chunks(n, p)
        for r, price in enumerate(all_ranks("ring", p, n, 8)):
            assert price.bytes == 8 * (2 * n - c[r] - c[(r + 1) % p])


def test_the_table_of_powers_of_two():
    for p in POWERS:
        n, log = 4096, log2(p)
        for r in range(p):
            halving = cost.all_reduce("halving_doubling", p, n, 1, r)
            assert halving == (2 * log, 2 * log, 2 * (p - 1) * n // p)
            assert cost.all_reduce("recursive_doubling", p, n, 1, r) == (log, log, log * n)
            sizes = cost.chunks(n, p)
            assert cost.reduce_scatter("halving", sizes, 1, r) == (log, log, (p - 1) * n // p)
            assert cost.all_gather("doubling", sizes, 1, r) == (log, log, (p - 1) * n // p)


def test_folding_other_numbers_of_ranks():
    """Of 6 ranks 0 and 2 are folded into 1 and 3, which with 4 and 5 do the work."""
    n, halved = 1200, 2 * 3 * 1200 // 4
    prices = all_ranks("halving_doubling", 6, n)
    assert [p.bytes for p in prices][0::2][:2] == [n, n]
    assert [p.steps for p in prices] == [2, 6, 2, 6, 4, 4]
    assert sum(p.bytes for p in prices) == 2 * n + 2 * n + 4 * halved
    assert all_ranks("recursive_doubling", 6, n)[1] == (4, 3, 3 * n)


def test_naive_root_is_the_bottleneck_but_the_total_is_the_same():
    for p in RANKS:
        root, *rest = all_ranks("naive", p)
        assert root == (2 * (p - 1), p - 1, (p - 1) * S)
        assert all(price == (2, 1, S) for price in rest)


@pytest.mark.parametrize("algorithm", ["naive", "tree", "ring", "double_tree"])
def test_all_move_the_same_total(algorithm):
    for p in RANKS:
        assert sum(price.bytes for price in all_ranks(algorithm, p)) == 2 * (p - 1) * S


def test_halving_moves_that_total_too_and_doubling_more():
    for p in POWERS:
        assert sum(price.bytes for price in all_ranks("halving_doubling", p)) == 2 * (p - 1) * S
        assert sum(price.bytes for price in all_ranks("recursive_doubling", p)) == p * log2(p) * S


@pytest.mark.parametrize("nodes", [[1, 1], [2, 2], [4, 4, 4], [1, 3], [2, 5, 3]])
def test_hierarchical_moves_that_total_in_fewer_steps(nodes):
    p, k, g = sum(nodes), len(nodes), min(nodes)
    prices = [cost.hierarchical(nodes, S, 1, r) for r in range(p)]
    if len(set(nodes)) == 1:
        assert sum(price.bytes for price in prices) == 2 * (p - 1) * S
        assert {price.steps for price in prices} == {2 * (g - 1) + 2 * (k - 1)}


def test_double_tree_never_more_than_twice_the_vector():
    for p in RANKS[3:]:
        sent = [cost.double_tree(p, S, 1, r).bytes for r in range(p)]
        assert max(sent) == 2 * S and min(sent) == S


def test_binomial_trees():
    for p in RANKS:
        up = (p - 1).bit_length()
        for root in {0, p - 1, p // 2}:
            down = [cost.broadcast("tree", p, S, 1, r, root) for r in range(p)]
            back = [cost.reduce("tree", p, S, 1, r, root) for r in range(p)]
            assert down[root].bytes == up * S and sum(d.bytes for d in down) == (p - 1) * S
            assert back[root].bytes == 0 and sum(b.bytes for b in back) == (p - 1) * S
            assert max(d.steps for d in down) == max(b.steps for b in back) == up


def test_scatter_gather_and_all_to_all():
    out = [cost.scatter([5, 0, 3], 2, r, root=2) for r in range(3)]
    back = [cost.gather([5, 0, 3], 2, r, root=2) for r in range(3)]
    assert out == [(1, 0, 0), (1, 0, 0), (2, 2, 10)]
    assert back == [(1, 1, 10), (1, 1, 0), (2, 0, 0)]
    assert cost.all_to_all("pairwise", [4, 1, 2], 8, 1) == (2, 2, 48)
    hops = {2: 1, 3: 2, 4: 4, 5: 5, 6: 7, 7: 9, 8: 12, 16: 32}
    for p, total in hops.items():
        assert cost.all_to_all("bruck", [3] * p, 1, 0) == ((p - 1).bit_length(),) * 2 + (3 * total,)


def test_one_rank_pays_nothing():
    for algorithm in ("naive", "tree", "ring", "recursive_doubling", "halving_doubling",
                      "double_tree"):
        assert cost.all_reduce(algorithm, 1, 1000, 4, 0) == (0, 0, 0), algorithm


def test_busiest_rank_of_the_exact_price_is_the_time_models():
    """With even sizes the model's steps and bytes are those of the rank that pays most."""
    for p in RANKS[1:]:
        n = 5040 * p
        for name in "naive", "tree", "recursive_doubling", "halving_doubling", "ring":
            prices = all_ranks(name, p, n)
            steps = cost.seconds("all_reduce", name, p, n, alpha=1, beta=0, gamma=0)
            assert steps == max(price.steps for price in prices), name
        ring = cost.seconds("all_reduce", "ring", p, n, 0, 1, 0)
        assert ring == pytest.approx(max(x.bytes for x in all_ranks("ring", p, n)))


def test_ring_overtakes_doubling_where_the_formula_says():
    p, alpha, beta = 8, 1e-5, 1e-9
    crossover = alpha * (2 * (p - 1) - 3) / (beta * (3 - 2 * (p - 1) / p))
    for factor, winner in (0.99, "recursive_doubling"), (1.01, "ring"):
        times = {name: cost.seconds("all_reduce", name, p, crossover * factor, alpha, beta, 0)
                 for name in ("ring", "recursive_doubling")}
        assert min(times, key=times.get) == winner

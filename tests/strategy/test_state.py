"""The order in which an optimizer got its parameters, from what the ranks know of it."""

from lightning_par.strategy.state import merge_orders

MODULE = ["a", "b", "c", "d"]


def test_ranks_that_hold_all_parameters_tell_the_order_whatever_it_is():
    order = [[["d", "a"], ["c", "b"]]]
    assert merge_orders([order, order], MODULE) == (order, True)


def test_stages_that_keep_to_the_module_tell_the_order_of_the_whole():
    first, second = [[["a", "c"], ["d"]]], [[["b"]]]  # the second has no group for what it does not hold
    assert merge_orders([first, second], MODULE) == ([[["a", "b", "c"], ["d"]]], True)


def test_stages_with_an_order_of_their_own_do_not():
    assert merge_orders([[[["b", "a"]]], [[["d", "c"]]]], MODULE) == ([[["b", "a", "d", "c"]]], False)


def test_a_tied_weight_of_two_stages_counts_once():
    assert merge_orders([[[["a", "b"]]], [[["a", "c"]]]], MODULE) == ([[["a", "b", "c"]]], True)

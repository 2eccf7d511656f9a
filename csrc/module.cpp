// megatron_hdp._core: the planner core. Each function has a Python twin in megatron_hdp/planner that gives identical
// results; integers only, so that every platform makes the same plan.

#include "arrays.hpp"

void bind_arena(nb::module_ &module);
void bind_bound(nb::module_ &module);
void bind_candidate(nb::module_ &module);
void bind_check(nb::module_ &module);
void bind_cost(nb::module_ &module);
void bind_packing(nb::module_ &module);
void bind_packs(nb::module_ &module);
void bind_plan_dp(nb::module_ &module);
void bind_span(nb::module_ &module);
void bind_waves(nb::module_ &module);

NB_MODULE(_core, module) {
    module.doc() = "Planner core in C++; the twins in megatron_hdp.planner give the same results without it.";
    bind_arena(module);
    bind_bound(module);
    bind_candidate(module);
    bind_check(module);
    bind_cost(module);
    bind_packing(module);
    bind_packs(module);
    bind_plan_dp(module);
    bind_span(module);
    bind_waves(module);
}

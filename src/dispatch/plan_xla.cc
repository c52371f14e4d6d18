#include "anabranch/dispatch.h"
#include "core/xla.h"

namespace {

using anabranch::xla::Field;

constexpr Field kPlanFields[] = {
    AB_INT32(ab_plan_args, num_experts),      AB_INT32(ab_plan_args, align_size),
    AB_INT32(ab_plan_args, num_destinations), AB_TENSOR(ab_plan_args, experts),
    AB_TENSOR(ab_plan_args, routing_map),     AB_TENSOR(ab_plan_args, tokens_per_expert),
    AB_TENSOR(ab_plan_args, group_sizes),     AB_TENSOR(ab_plan_args, offsets),
    AB_TENSOR(ab_plan_args, row_of_slot),     AB_TENSOR(ab_plan_args, slot_of_row),
    AB_TENSOR(ab_plan_args, dropped),         AB_TENSOR(ab_plan_args, row_id_map),
    AB_LATER_INT32(ab_plan_args, is_part),    AB_LATER_INT32(ab_plan_args, first_expert),
};

}  // namespace

AB_XLA_HANDLER(plan, kPlanFields, ab_plan_workspace);

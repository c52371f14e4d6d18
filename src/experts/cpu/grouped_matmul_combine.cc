#include <algorithm>

#include "anabranch/dispatch.h"
#include "anabranch/experts.h"
#include "core/entry.h"
#include "experts/check.h"
#include "experts/cpu/lora.h"
#include "experts/cpu/no_exchange.h"
#include "experts/cpu/phases.h"
#include "experts/cpu/quantized_operands.h"

namespace anabranch {
namespace {

struct GroupedMatmulCombine {
  const ab_grouped_matmul_combine_args& args;
  CombinedSizes s;
  int threads;
  Workspace workspace;
  GroupedRows rows;
  ProductOperands<ab_grouped_matmul_combine_args> operands;
  ProductAdapter<ab_grouped_matmul_combine_args> adapter;
  Products products;
  ab_tensor y;  // [R, N]
  ab_exec for_sum;

  GroupedMatmulCombine(const ab_grouped_matmul_combine_args& arguments, const CombinedSizes& sizes, const ab_exec* exec,
                       const ab_exec* memory)
      : args(arguments),
        s(sizes),
        threads(threads_for(exec, s.R, s.D * s.N)),
        workspace(memory),
        rows(workspace, s.R, s.E, true, is_early()),
        operands(workspace, args, s),
        adapter(workspace, args, s, s.rows_dtype),
        products(workspace, threads, s.R, std::max({s.D, s.N, s.rank}), std::min(std::max(s.N, s.rank), kTileColumns),
                 packed_block_bytes(args.w, args.transpose_w != 0, s.N, s.D)),
        y{workspace.take_rows(s.R, s.N, s.rows_dtype), s.rows_dtype, 2, {s.R, s.N}, nullptr},
        for_sum(*exec) {}

  bool is_early() const { return args.weight_early != 0; }

  ab_combine_args sum() const {
    return {sizeof(ab_combine_args), &y, args.row_of_slot, is_early() ? nullptr : args.weights, args.out, args.addend};
  }

  // Gives the remaining workspace to the sum over the assignments of a token.
  ab_status take_workspace_of_sum() {
    size_t bytes_before = 0;
    AB_RETURN_IF_ERROR(report_workspace(workspace.size(), &bytes_before));  // checks that [R, N] can be a tensor
    const void* rows_memory = y.data;
    if (rows_memory == nullptr) y.data = this;  // no memory yet; the query reads none
    const ab_combine_args combine = sum();
    AB_RETURN_IF_ERROR(ab_combine_workspace(&combine, &for_sum, &for_sum.workspace_size));
    y.data = const_cast<void*>(rows_memory);
    for_sum.workspace = workspace.take_bytes(for_sum.workspace_size);
    return ok();
  }

  ab_status run() {
    rows.fill(threads, args.group_sizes, args.slot_of_row, is_early() ? args.weights : nullptr, s.T, s.K);
    operands.fill(threads);
    RowProduct product{operands.x(), operands.w(), matrix_of(&y, 0, s.N), s.N, s.D, nullptr, args.bias, rows.scale};
    product.low_rank = adapter.compute(products, threads, rows);
    multiply_grouped_rows(products, threads, rows, product);
    AB_RETURN_IF_ERROR(products.status());
    const ab_combine_args combine = sum();
    return ab_combine(&combine, &for_sum);
  }
};

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" {

ab_status ab_grouped_matmul_combine_workspace(const ab_grouped_matmul_combine_args* args, const ab_exec* exec,
                                              size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  AB_RETURN_IF_ERROR(check_no_exchange("returning", args->returning));
  CombinedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  GroupedMatmulCombine op(*args, s, exec, nullptr);
  AB_RETURN_IF_ERROR(op.take_workspace_of_sum());
  return report_workspace(op.workspace.size(), bytes);
}

ab_status ab_grouped_matmul_combine(const ab_grouped_matmul_combine_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  AB_RETURN_IF_ERROR(check_no_exchange("returning", args->returning));
  CombinedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  GroupedMatmulCombine op(*args, s, exec, exec);
  AB_RETURN_IF_ERROR(Products::check(op.operands.x().dtype, op.operands.w().value_dtype()));
  if (s.rank > 0) AB_RETURN_IF_ERROR(Products::check(s.rows_dtype, s.rows_dtype));
  AB_RETURN_IF_ERROR(op.take_workspace_of_sum());
  AB_RETURN_IF_ERROR(check_workspace(exec, op.workspace.size()));
  return op.run();
}

}  // extern "C"

#include <algorithm>

#include "anabranch/experts.h"
#include "core/entry.h"
#include "experts/check.h"
#include "experts/cpu/lora.h"
#include "experts/cpu/phases.h"
#include "experts/cpu/quantized_operands.h"

namespace anabranch {
namespace {

struct GroupedMatmul {
  int threads;
  Workspace workspace;
  GroupedRows rows;
  Products products;

  GroupedMatmul(const GroupedSizes& s, const ab_exec* exec, const ab_exec* memory)
      : threads(threads_for(exec, s.R, s.D * s.N)),
        workspace(memory),
        rows(workspace, s.R, s.E, false, false),
        products(workspace, threads, s.R, std::max({s.D, s.N, s.rank}), std::min(std::max(s.N, s.rank), kTileColumns)) {
  }
};

}  // namespace
}  // namespace anabranch

using namespace anabranch;

extern "C" {

ab_status ab_grouped_matmul_workspace(const ab_grouped_matmul_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  GroupedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  GroupedMatmul op(s, exec, nullptr);
  const ProductOperands operands(op.workspace, *args, s);
  const ProductAdapter adapter(op.workspace, *args, s, args->y->dtype);
  return report_workspace(op.workspace.size(), bytes);
}

ab_status ab_grouped_matmul(const ab_grouped_matmul_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  GroupedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  GroupedMatmul op(s, exec, exec);
  const ProductOperands operands(op.workspace, *args, s);
  const ProductAdapter adapter(op.workspace, *args, s, args->y->dtype);
  AB_RETURN_IF_ERROR(Products::check(operands.x().dtype, operands.w().dtype));
  if (s.rank > 0) AB_RETURN_IF_ERROR(Products::check(args->y->dtype, args->y->dtype));
  AB_RETURN_IF_ERROR(check_workspace(exec, op.workspace.size()));
  op.rows.fill(op.threads, args->group_sizes, nullptr, nullptr, 0, 0);
  operands.fill(op.threads);
  RowProduct product{operands.x(), operands.w(), matrix_of(args->y, 0, s.N), s.N, s.D};
  product.low_rank = adapter.compute(op.products, op.threads, op.rows);
  multiply_grouped_rows(op.products, op.threads, op.rows, product);
  return op.products.status();
}

ab_status ab_grouped_matmul_dw_workspace(const ab_grouped_matmul_dw_args* args, const ab_exec* exec, size_t* bytes) {
  AB_ENTER_QUERY(args, exec, bytes);
  GroupedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  return report_workspace(GroupedMatmul(s, exec, nullptr).workspace.size(), bytes);
}

ab_status ab_grouped_matmul_dw(const ab_grouped_matmul_dw_args* args, const ab_exec* exec) {
  AB_ENTER(args, exec);
  GroupedSizes s;
  AB_RETURN_IF_ERROR(check(args, &s));
  AB_RETURN_IF_ERROR(Products::check(args->x->dtype, args->d_y->dtype));
  GroupedMatmul op(s, exec, exec);
  AB_RETURN_IF_ERROR(check_workspace(exec, op.workspace.size()));
  op.rows.fill(op.threads, args->group_sizes, nullptr, nullptr, 0, 0);
  weight_gradient(op.products, op.threads, op.rows, matrix_of(args->x, 0, s.D), s.D, matrix_of(args->d_y, 0, s.N), s.N,
                  args->accumulate != 0, args->d_w);
  return op.products.status();
}

}  // extern "C"

#include "dispatch/check.h"

namespace anabranch {
namespace {

ab_status check_maps(const ab_tensor* row_of_slot, const ab_tensor* slot_of_row, int64_t T, Maps* maps) {
  AB_RETURN_IF_ERROR(check_row_of_slot(row_of_slot, T, {"K"}, maps));
  return check_slot_of_row(slot_of_row, maps);
}

}  // namespace

ab_status check_dispatch(const ab_dispatch_args* args, Spread* spread) {
  const bool weighted = args->weights != nullptr;
  AB_RETURN_IF_ERROR(check_tensor("x", args->x, weighted ? kFloats : kAnyDtype, {{"T"}, {"D"}}));
  Maps& maps = spread->maps;
  AB_RETURN_IF_ERROR(check_maps(args->row_of_slot, args->slot_of_row, args->x->shape[0], &maps));
  AB_RETURN_IF_ERROR(check_optional("weights", args->weights, kFloats, {{"T", maps.T}, {"K", maps.K}}));
  const Dtypes x_dtype = 1u << args->x->dtype;
  AB_RETURN_IF_ERROR(check_tensor("rows", args->rows, (x_dtype & kFloats) != 0 ? kFloats : x_dtype,
                                  {{"R", maps.R}, {"D", args->x->shape[1]}}));
  spread->x = Rows(args->x);
  spread->weights = Floats(args->weights);
  spread->to = Rows(args->rows);
  return ok();
}

ab_status check_combine_backward(const ab_combine_backward_args* args, Spread* spread) {
  AB_RETURN_IF_ERROR(check_tensor("d_out", args->d_out, kFloats, {{"T"}, {"D"}}));
  const int64_t D = args->d_out->shape[1];
  Maps& maps = spread->maps;
  AB_RETURN_IF_ERROR(check_maps(args->row_of_slot, args->slot_of_row, args->d_out->shape[0], &maps));
  AB_RETURN_IF_ERROR(check_optional("rows", args->rows, kFloats, {{"R", maps.R}, {"D", D}}));
  AB_RETURN_IF_ERROR(check_optional("weights", args->weights, kFloats, {{"T", maps.T}, {"K", maps.K}}));
  AB_RETURN_IF_ERROR(check_optional("d_rows", args->d_rows, kFloats, {{"R", maps.R}, {"D", D}}));
  AB_RETURN_IF_ERROR(check_optional("d_weights", args->d_weights, kFloats, {{"T", maps.T}, {"K", maps.K}}));
  if (args->d_weights != nullptr && args->rows == nullptr) {
    return AB_INVALID("rows: got NULL together with d_weights, expected the combined rows");
  }
  spread->x = Rows(args->d_out);
  spread->weights = Floats(args->weights);
  spread->to = Rows(args->d_rows);
  spread->other = Rows(args->rows);
  spread->products = Floats(args->d_weights);
  return ok();
}

ab_status check_combine(const ab_combine_args* args, GatherSum* sum) {
  AB_RETURN_IF_ERROR(check_tensor("rows", args->rows, kFloats, {{"R"}, {"D"}}));
  Maps& maps = sum->maps;
  maps.R = args->rows->shape[0];
  AB_RETURN_IF_ERROR(check_num_rows("rows", maps.R));
  AB_RETURN_IF_ERROR(check_row_of_slot(args->row_of_slot, -1, {"K"}, &maps));
  AB_RETURN_IF_ERROR(check_optional("weights", args->weights, kFloats, {{"T", maps.T}, {"K", maps.K}}));
  AB_RETURN_IF_ERROR(check_tensor("out", args->out, kFloats, {{"T", maps.T}, {"D", args->rows->shape[1]}}));
  AB_RETURN_IF_ERROR(check_optional("addend", args->addend, kFloats, {{"T", maps.T}, {"D", args->rows->shape[1]}}));
  sum->rows = Rows(args->rows);
  sum->weights = Floats(args->weights);
  sum->out = Rows(args->out);
  sum->addend = Rows(args->addend);
  return ok();
}

ab_status check_sort_chunks(const ab_sort_chunks_args* args, ChunkSort* sort) {
  if (args->inverse != 0 && args->inverse != 1) return AB_INVALID("inverse: got %d, expected 0 or 1", args->inverse);
  AB_RETURN_IF_ERROR(check_tensor("x", args->x, kAnyDtype, {{"R"}, {"D"}}));
  sort->R = args->x->shape[0];
  AB_RETURN_IF_ERROR(check_num_rows("x", sort->R));
  AB_RETURN_IF_ERROR(check_tensor("split_sizes", args->split_sizes, kInt32, {{"S"}}));
  sort->S = args->split_sizes->shape[0];
  AB_RETURN_IF_ERROR(check_tensor("sorted_indices", args->sorted_indices, kInt32, {{"S", sort->S}}));
  AB_RETURN_IF_ERROR(check_tensor("out", args->out, 1u << args->x->dtype, {{"R", sort->R}, {"D", args->x->shape[1]}}));
  AB_RETURN_IF_ERROR(check_optional("row_id_map", args->row_id_map, kInt32, {{"R", sort->R}}));
  sort->inverse = args->inverse == 1;
  sort->x = Rows(args->x);
  sort->out = Rows(args->out);
  sort->sizes = data<const int32_t>(args->split_sizes);
  sort->order = data<const int32_t>(args->sorted_indices);
  sort->row_id_map = data<int32_t>(args->row_id_map);
  return ok();
}

ab_status check_expand_row_id_map(const ab_expand_row_id_map_args* args, RowIdMap* map) {
  Maps& maps = map->maps;
  AB_RETURN_IF_ERROR(check_row_of_slot(args->row_of_slot, -1, {"E"}, &maps));
  const int64_t E = maps.K;
  AB_RETURN_IF_ERROR(check_tensor("row_id_map", args->row_id_map, kInt32, {{"T", maps.T}, {"2E+1", 2 * E + 1}}));
  AB_RETURN_IF_ERROR(check_optional("pad_offsets", args->pad_offsets, kInt32, {{"E", E}}));
  map->ids = data<const int32_t>(args->row_id_map);
  map->padding = data<const int32_t>(args->pad_offsets);
  return check_slot_of_row(args->slot_of_row, &maps);
}

}  // namespace anabranch

// What Python hands over. The layouts are mirrored in native.py.
#pragma once

#include <cstdint>

extern "C" {

struct Linear {
  const void* weight;  // panels
  const float* bias;   // [padded outputs], or null
  int64_t inputs;
  int64_t outputs;  // those that exist; the last panel may be padded
  int64_t format;   // 0: float32, 1: bfloat16, 2, 3: blocks of 4, 8 bits; 4, 5: the same for integer products
};

struct Layer {
  const float* attention_norm;
  const float* mlp_norm;
  const float* query_norm;  // null: none
  const float* key_norm;
  Linear qkv;
  Linear attention_out;
  Linear gate_up;  // 16 gates, the 16 ups that belong to them, 16 gates, ...
  Linear down;
};

struct Model {
  const Layer* layers;
  const float* final_norm;
  const float* cosines;  // [positions, head size / 2]
  const float* sines;
  Linear head;
  int64_t num_layers;
  int64_t hidden;
  int64_t intermediate;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_size;
  float epsilon;
  float scaling;    // of attention scores
  int64_t half_kv;  // 1: keys and values are kept as float16, where the processor has it
};

struct Batch {
  float* hidden;             // [rows, hidden]: embeddings on entry
  const int64_t* positions;  // [rows]
  const int64_t* slot_rows;  // [rows]: storage row of position 0 of the row's sequence, a multiple of 16
  const int64_t* wanted;     // [num_wanted]: rows whose logits are wanted
  float* logits;             // [num_wanted, outputs of the head]
  int64_t* best;             // [num_wanted]: index of the largest of them, the lowest among equals
  float* top;                // [num_wanted]: its value; no number where one of them is none
  void* keys;                // [layers, storage rows / 16, KV heads, head size, 16 positions]
  void* values;              // [layers, storage rows, KV heads * head size]
  int64_t storage_rows;
  int64_t rows;
  int64_t num_wanted;
  int64_t num_layers;  // the first so many, at most the model's
};

}  // extern "C"

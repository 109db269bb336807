// Random moves against a plain sorted list, for every policy.
#include "core/eviction_order.h"

#include <algorithm>
#include <vector>

#include "check.h"

using namespace lmcache;

namespace {

struct Model {  // coldest first within equally many uses
  struct Item {
    Entry* entry;
    uint64_t uses;
    int64_t place;
    bool parked;
  };
  std::vector<Item> items;
  int64_t young = 0, cold = 0;

  Item& at(Entry* entry) {
    return *std::find_if(items.begin(), items.end(), [&](Item& i) { return i.entry == entry; });
  }
  std::vector<Entry*> order() {
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
      return a.uses != b.uses ? a.uses < b.uses : a.place < b.place;
    });
    std::vector<Entry*> entries;
    for (Item& item : items) {
      if (!item.parked) entries.push_back(item.entry);
    }
    return entries;
  }
};

void check_same(EvictionOrder& order, Model& model) {
  std::vector<Entry*> expected = model.order();
  CHECK(order.unparked() == expected);
  if (order.kind() == PolicyKind::kMru) std::reverse(expected.begin(), expected.end());
  VictimCursor cursor(order);
  for (Entry* entry : expected) CHECK(cursor.next() == entry);
  CHECK(cursor.next() == nullptr);
  CHECK(order.check().empty());
}

void run(PolicyKind kind, uint64_t seed) {
  EvictionOrder order(kind);
  Model model;
  std::vector<Entry> storage(200);
  std::vector<Entry*> idle;
  for (Entry& entry : storage) idle.push_back(&entry);
  Numbers numbers(seed);
  const bool recency = kind == PolicyKind::kLru || kind == PolicyKind::kLfu;
  const bool counts = kind == PolicyKind::kLfu;
  for (int step = 0; step < 3000; ++step) {
    const uint64_t action = numbers.below(8);
    if ((action < 2 || model.items.empty()) && !idle.empty()) {
      Entry* entry = idle.back();
      idle.pop_back();
      *entry = Entry{};
      const bool cold = numbers.below(3) == 0;
      order.insert(entry, cold);
      const bool is_cold = cold && recency;
      model.items.push_back(
          {entry, uint64_t(counts && !is_cold), is_cold ? --model.cold : ++model.young, false});
    } else if (!model.items.empty()) {
      Entry* entry = model.items[numbers.below(model.items.size())].entry;
      Model::Item& item = model.at(entry);
      if (action == 2) {
        order.remove(entry);
        idle.push_back(entry);
        model.items.erase(model.items.begin() + (&item - model.items.data()));
      } else if (action <= 4) {
        const bool is_hit = action == 4;
        const uint64_t batch = order.next_batch();
        const bool moves = recency || (is_hit && kind == PolicyKind::kMru);
        for (int twice = 0; twice < 2; ++twice) {  // a repeated use counts once
          CHECK((is_hit ? order.hit(entry, batch) : order.use(entry, batch)) == moves);
          if (!moves) continue;
          item.place = ++model.young;
          item.parked = false;
        }
        if (moves && counts) ++item.uses;
      } else if (action == 5) {
        const uint64_t batch = order.next_batch();
        CHECK(order.demote(entry, batch) == recency);
        CHECK(order.demote(entry, batch) == recency);  // a repeated demotion counts once
        if (recency) {
          item.uses = 0;
          item.place = --model.cold;
        }
      } else if (action == 6 && !item.parked) {
        order.park(entry);
        item.parked = true;
      } else if (action == 7 && item.parked) {
        order.unpark(entry);
        item.parked = false;
      }
    }
    check_same(order, model);
  }
}

}  // namespace

int main() {
  for (PolicyKind kind :
       {PolicyKind::kLru, PolicyKind::kLfu, PolicyKind::kFifo, PolicyKind::kMru}) {
    for (uint64_t seed = 1; seed <= 3; ++seed) run(kind, seed);
  }
  return 0;
}

-- Reserve for a group of pods. Arguments: now, expires_at, texts of the resources that occur, rows of
-- {pod, body, tag, number of its resources, and per candidate the texts of its takes and shares}.
-- Answers per pod: {candidate (from 1), version, grants}, {0, lease} for a pod that has one,
-- {-1, reason, nodes, devices} if nothing fits.
local now, expires_at, texts, rows = A[1], A[2], A[3], A[4]

local resources_of, takes_of, pods, first_nodes, first_devices = {}, {}, {}, {}, {}
for i, text in ipairs(texts) do resources_of[i] = parse(text) end
for i, row in ipairs(rows) do
  pods[i] = row[1]
  if row[5] then
    local takes = parse(row[5])
    takes_of[i] = takes
    first_nodes[#first_nodes + 1] = takes[1]
    for h = 1, #takes[2], HOLD do first_devices[#first_devices + 1] = takes[2][h] end
  end
end
fetch('lease', pods)
fetch('node', first_nodes)
fetch('device', first_devices)

local function grants_for(holds, places)
  local grants, slots = {}, {}
  for h = 1, #holds, HOLD do
    local device, given = devices[holds[h]], {}
    for s = 1, holds[h + 4] do
      given[s] = lowest_slot(device[D_TAKEN])
      device[D_TAKEN] = with_slot(device[D_TAKEN], given[s], '1')
    end
    slots[#slots + 1] = given
  end
  for p = 1, #places, 2 do
    local device = devices[holds[(places[p] - 1) * HOLD + 1]]
    device[D_FENCE] = device[D_FENCE] + 1
    grants[p] = places[p + 1] > 0 and slots[places[p]][places[p + 1]] or -1
    grants[p + 1] = device[D_FENCE]
  end
  return grants
end

local function full(row, reasons)
  local told_nodes, told_devices = {}, {}
  for c = 5, #row, 2 do
    local takes = parse(row[c])
    local node = nodes[takes[1]]
    if node then told_nodes[#told_nodes + 1] = {takes[1], node} end
    for h = 1, #takes[2], HOLD do
      local device = device_of(takes[2][h])
      if device then told_devices[#told_devices + 1] = {takes[2][h], device} end
    end
  end
  return {-1, table.concat(reasons, '; '), told_nodes, told_devices}
end

local out, reserved = {}, {}
for i, row in ipairs(rows) do
  local pod, tag, resources = row[1], row[3], resources_of[row[4]]
  if leases[pod] then
    out[i] = {0, leases[pod]}
  else
    local reasons
    for c = 5, #row, 2 do
      local takes = c == 5 and takes_of[i] or parse(row[c])
      local node, holds = takes[1], takes[2]
      local why = fits(node, resources, holds, tag)
      if not why then
        local grants = grants_for(holds, takes[3])
        local version = next_version()
        leases[pod] = {'reserved', version, version, node, now, expires_at, tag, texts[row[4]],
          row[c], grants, pod, row[2], row[c + 1]}
        count(node, resources, holds, tag, 1)
        index_lease(pod, leases[pod])
        reserved[#reserved + 1] = pod
        out[i] = {(c - 3) / 2, version, grants}
        break
      end
      reasons = reasons or {}
      reasons[#reasons + 1] = node .. ': ' .. why
    end
    if not out[i] then out[i] = full(row, reasons or {'no candidate'}) end
  end
end
if #reserved > 0 then
  leave_waiting(reserved)
  flush('reserved')
end
return pack(out)

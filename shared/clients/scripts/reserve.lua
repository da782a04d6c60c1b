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
    for h = TAKES, takes[2], HOLD do first_devices[#first_devices + 1] = takes[h] end
  end
end
fetch('lease', pods)
fetch('node', first_nodes)
fetch('device', first_devices)

local function take_slot(device)
  local slot = lowest_slot(device[D_TAKEN])
  device[D_TAKEN] = with_slot(device[D_TAKEN], slot, '1')
  return slot
end

local function raise_fence(device)
  device[D_FENCE] = device[D_FENCE] + 1
  return device[D_FENCE]
end

local function grants_for(takes)
  local last = takes[2]
  if #takes == TAKES + HOLD + 1 then
    local device = devices[takes[TAKES]]
    return {takes[TAKES + 4] > 0 and take_slot(device) or -1, raise_fence(device)}
  end
  local grants, slots = {}, {}
  for h = TAKES, last, HOLD do
    local device, given = devices[takes[h]], {}
    for s = 1, takes[h + 4] do given[s] = take_slot(device) end
    slots[#slots + 1] = given
  end
  for p = last + 1, #takes, 2 do
    local hold, place = takes[p], takes[p + 1]
    grants[#grants + 1] = place > 0 and slots[hold][place] or -1
    grants[#grants + 1] = raise_fence(devices[takes[TAKES + (hold - 1) * HOLD]])
  end
  return grants
end

local function full(row, reasons)
  local told_nodes, told_devices = {}, {}
  for c = 5, #row, 2 do
    local takes = parse(row[c])
    local node = nodes[takes[1]]
    if node then told_nodes[#told_nodes + 1] = {takes[1], node} end
    for h = TAKES, takes[2], HOLD do
      local device = device_of(takes[h])
      if device then told_devices[#told_devices + 1] = {takes[h], device} end
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
      local node = takes[1]
      local why = fits(takes, resources, tag)
      if not why then
        local grants = grants_for(takes)
        local version = next_version()
        leases[pod] = {'reserved', version, version, node, now, expires_at, tag, texts[row[4]],
          row[c], grants, pod, row[2], row[c + 1]}
        count(takes, resources, tag, 1)
        index_lease(pod, node, expires_at)
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

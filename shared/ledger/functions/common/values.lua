-- Lists, sets and packed values.
local decode, unpack_limit, byte = cmsgpack.unpack, cmsgpack.unpack_limit, string.byte
local M = {}

function M.append(list, ...)
  for i = 1, select('#', ...) do list[#list + 1] = (select(i, ...)) end
end

function M.set_of(list)
  local set = {}
  for _, name in ipairs(list) do set[name] = true end
  return set
end

-- For each pair of a flat list, its two values.
function M.each_pair(flat)
  local i = -1
  return function()
    i = i + 2
    return flat[i], flat[i + 1]
  end
end

-- Records are read with `unpack_limit`, as lists of values: a table that is made of a list has its size at once, and
-- those that `unpack` makes are enlarged again and again.

-- Whether the first and the last of a record's values have its types: all would take too long, and what damages one
-- value changes how many follow.
local function has_types(record, layout)
  local types, last = layout.TYPES, layout.COUNT
  return type(record[1]) == types[1] and type(record[last]) == types[last]
end
M.has_types = has_types

local function whole_record(layout, is_read, rest, ...)
  if is_read and rest == -1 then
    local record = {...}
    if has_types(record, layout) then return record end
  end
end

-- The record that was packed with this layout, or nil if it is missing or cannot be decoded. Another number of values
-- leaves a rest, or the last one without its type.
function M.record(value, layout)
  if not value or byte(value) ~= layout.FIRST_BYTE then return nil end
  return whole_record(layout, pcall(unpack_limit, value, layout.COUNT, #layout.HEADER))
end

local function values_and_rest(rest, ...) return {...}, rest end

-- The record of this layout, of less than 16 values, that begins at `at` (from 0), and where the rest begins (-1: there
-- is none); or nil if something else begins there. Raises an error if what follows cannot be decoded.
function M.record_at(text, at, layout)
  if byte(text, at + 1) ~= layout.FIRST_BYTE then return nil end
  return values_and_rest(unpack_limit(text, layout.COUNT, at + 1))
end

-- The first bytes of packed arrays: less their number, of up to 15 values; and before two bytes with their number.
local FIXED_ARRAY, ARRAY_16 = 0x90, 0xdc

local function with_list(value, layout)
  local last = layout.COUNT
  local record, list_at = values_and_rest(unpack_limit(value, last - 1, #layout.HEADER))
  local first, high, low = byte(value, list_at + 1, list_at + 3)
  local count, begins = first - FIXED_ARRAY, list_at + 1
  if first == ARRAY_16 then count, begins = 256 * high + low, list_at + 3 end
  local list, rest = values_and_rest(unpack_limit(value, count, begins))
  record[last] = list
  return #list == count and rest == -1 and has_types(record, layout) and record
end

-- As `record`, for a layout of which the last value is a list: the list has its size at once, too.
function M.record_with_list(value, layout)
  if not value or byte(value) ~= layout.FIRST_BYTE then return nil end
  local is_read, record = pcall(with_list, value, layout)
  return is_read and record or nil
end

-- What was packed, or as JSON; {} if it is missing or cannot be read.
function M.readable(value, parse)
  if not value then return {} end
  local is_read, content = pcall(parse or decode, value)
  return is_read and type(content) == 'table' and content or {}
end

return M

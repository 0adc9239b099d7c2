// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"encoding"
	"errors"
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// A document is a YAML file, and what is wrong with it. viper reads YAML as well, but
// has forgotten where things were, writes all keys in lower case, those of handlers'
// parameters too, and knows no strict reading.
type document struct {
	file     string
	lines    []string
	at       map[string]*yaml.Node // values by path
	names    map[string]string     // where values that are not the file's come from, by path
	bad      map[string]bool       // paths with a value that could not be read
	problems []located
	broken   bool // no YAML: checks of it make no sense
}

// parseYAML reads a file into a struct whose fields are named by their JSON tags.
func parseYAML(file string, text []byte, into any) *document {
	d := &document{
		file:  file,
		lines: strings.Split(string(text), "\n"),
		at:    map[string]*yaml.Node{},
		names: map[string]string{},
		bad:   map[string]bool{},
	}
	dec := yaml.NewDecoder(bytes.NewReader(text))
	var root yaml.Node
	err := dec.Decode(&root)
	if errors.Is(err, io.EOF) {
		return d // empty
	}
	if err == nil {
		if more := dec.Decode(new(yaml.Node)); !errors.Is(more, io.EOF) {
			if err = more; err == nil {
				err = errors.New("unexpected second document, after ---")
			}
		}
	}
	if err != nil {
		d.broken = true
		d.problems = append(d.problems, d.syntax(err))
		return d
	}
	d.at[""] = root.Content[0]
	d.decode(root.Content[0], reflect.ValueOf(into).Elem(), "", 0)
	return d
}

// yamlLine finds the line that the parser's errors begin with.
var yamlLine = regexp.MustCompile(`^(?:yaml: )?(?:unmarshal errors:\s+)?line (\d+): (.*)$`)

func (d *document) syntax(err error) located {
	msg := strings.TrimPrefix(err.Error(), "yaml: ")
	if m := yamlLine.FindStringSubmatch(err.Error()); m != nil {
		line, _ := strconv.Atoi(m[1])
		column := 1
		if strings.Contains(m[2], "tab character") { // the parser names the line before
			for n := line; n <= min(line+1, len(d.lines)); n++ {
				text := d.lines[n-1]
				indent := text[:len(text)-len(strings.TrimLeft(text, " \t"))]
				if i := strings.IndexByte(indent, '\t'); i >= 0 {
					line, column = n, i+1
					break
				}
			}
		}
		return located{source: d.file, line: line, column: column, msg: m[2]}
	}
	return located{source: d.file, msg: msg}
}

// fail says what is wrong with the value of a path.
func (d *document) fail(n *yaml.Node, path, format string, args ...any) {
	d.bad[path] = true
	msg := fmt.Sprintf(format, args...)
	if path != "" {
		msg = path + ": " + msg
	}
	d.problems = append(d.problems, located{d.file, n.Line, n.Column, msg})
}

// maxDepth is deeper than any configuration, and ends aliases of themselves.
const maxDepth = 32

var kinds = map[yaml.Kind]string{
	yaml.SequenceNode: "a list", yaml.MappingNode: "keys with values", yaml.ScalarNode: "a single value",
}

// decode puts a node into v.
func (d *document) decode(n *yaml.Node, v reflect.Value, path string, depth int) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if depth > maxDepth {
		d.fail(n, path, "nested too deeply")
		return
	}
	want := func(k yaml.Kind) bool {
		if n.Kind == k {
			return true
		}
		found := kinds[n.Kind]
		if n.ShortTag() == "!!null" {
			found = "nothing"
		}
		d.fail(n, path, "want %s, found %s", kinds[k], found)
		return false
	}
	if _, ok := v.Addr().Interface().(encoding.TextUnmarshaler); !ok {
		switch v.Kind() {
		case reflect.Pointer:
			if n.ShortTag() == "!!null" {
				d.fail(n, path, "want keys with values, found nothing: write {} for the defaults")
				return
			}
			v.Set(reflect.New(v.Type().Elem()))
			d.decode(n, v.Elem(), path, depth)
			return
		case reflect.Struct:
			if want(yaml.MappingNode) {
				d.mapping(n, v, path, depth)
			}
			return
		case reflect.Slice:
			if n.ShortTag() == "!!null" || !want(yaml.SequenceNode) { // all of it may be commented out
				return
			}
			v.Set(reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content)))
			for i, e := range n.Content {
				p := fmt.Sprintf("%s[%d]", path, i)
				d.at[p] = e
				d.decode(e, v.Index(i), p, depth+1)
			}
			return
		case reflect.Map: // of params: what is in it is the handlers' business
			if n.ShortTag() == "!!null" || !want(yaml.MappingNode) {
				return
			}
			if !d.unique(n, path) {
				return
			}
			for i := 0; i+1 < len(n.Content); i += 2 {
				d.at[join(path, n.Content[i].Value)] = n.Content[i+1]
			}
			if err := n.Decode(v.Addr().Interface()); err != nil {
				p := d.syntax(err)
				if p.line == 0 {
					p.line, p.column = n.Line, n.Column
				}
				p.msg = path + ": " + p.msg
				d.bad[path] = true
				d.problems = append(d.problems, p)
			}
			return
		}
	}
	if !want(yaml.ScalarNode) {
		return
	}
	if tag := n.ShortTag(); tag == "!!null" {
		d.fail(n, path, "has no value")
		return
	} else if v.Kind() == reflect.String && tag == "!!bool" {
		d.fail(n, path, "%s is not text: put it in quotes if it is meant as a name", n.Value)
		return
	}
	if err := setText(v, n.Value); err != nil {
		d.fail(n, path, "%v", err)
	}
}

// unique says which keys are there more than once.
func (d *document) unique(n *yaml.Node, path string) bool {
	first := map[string]int{}
	ok := true
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		if line, twice := first[key.Value]; twice {
			d.fail(key, join(path, key.Value), "appears twice, first on line %d", line)
			ok = false
			continue
		}
		first[key.Value] = key.Line
	}
	return ok
}

// hasKey tells whether the document has a key at its top, known or not.
func (d *document) hasKey(name string) bool {
	n := d.at[""]
	if n == nil || n.Kind != yaml.MappingNode {
		return false
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == name {
			return true
		}
	}
	return false
}

// mapping puts the keys of a node into the fields of a struct.
func (d *document) mapping(n *yaml.Node, v reflect.Value, path string, depth int) {
	d.unique(n, path)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		f := field(v, key.Value)
		if !f.IsValid() {
			d.problems = append(d.problems, located{d.file, key.Line, key.Column,
				problem{path: path, msg: fmt.Sprintf("unknown key %q: %s", key.Value, suggest(key.Value, fieldNames(v.Type())))}.Error()})
			continue
		}
		p := join(path, key.Value)
		d.at[p] = value
		d.decode(value, f, p, depth+1)
	}
}

// setText puts the text of a scalar into v.
func setText(v reflect.Value, text string) error {
	if u, ok := v.Addr().Interface().(encoding.TextUnmarshaler); ok {
		return u.UnmarshalText([]byte(text))
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(text)
	case reflect.Bool:
		b, err := strconv.ParseBool(text)
		if err != nil {
			return fmt.Errorf("%q is neither true nor false", text)
		}
		v.SetBool(b)
	case reflect.Int:
		i, err := strconv.ParseInt(text, 10, 0)
		if err != nil {
			return fmt.Errorf("%q is not a whole number", text)
		}
		v.SetInt(i)
	case reflect.Uint32:
		u, err := strconv.ParseUint(text, 10, 32)
		if err != nil {
			return fmt.Errorf("%q is not a whole number from 0 to 4294967295", text)
		}
		v.SetUint(u)
	default:
		panic(fmt.Sprintf("configuration field of type %v", v.Type()))
	}
	return nil
}

// field returns the field of a struct with a JSON name.
func field(v reflect.Value, name string) reflect.Value {
	for i := range v.NumField() {
		if jsonName(v.Type().Field(i)) == name {
			return v.Field(i)
		}
	}
	return reflect.Value{}
}

func jsonName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	return name
}

func fieldNames(t reflect.Type) (names []string) {
	for i := range t.NumField() {
		names = append(names, jsonName(t.Field(i)))
	}
	return names
}

// fieldOf returns what a dotted path names.
func fieldOf(cfg *Config, path string) reflect.Value {
	v := reflect.ValueOf(cfg).Elem()
	for name := range strings.SplitSeq(path, ".") {
		v = field(v, name)
	}
	return v
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// suggest names the known word that is nearest to one that is not, or all if none is
// near.
func suggest(word string, known []string) string {
	best, least := "", 0
	for _, k := range known {
		if n := distance(strings.ToLower(word), k); best == "" || n < least {
			best, least = k, n
		}
	}
	if best == "" {
		return "there are none"
	}
	if least <= max(1, len(word)/2) {
		return fmt.Sprintf("is it %s?", best)
	}
	sorted := slices.Sorted(slices.Values(known))
	return "want " + strings.Join(sorted, ", ")
}

// distance is how many letters must be changed, inserted, left out or swapped with
// their neighbour to make one word of the other.
func distance(a, b string) int {
	rows := make([][]int, len(a)+1)
	for i := range rows {
		rows[i] = make([]int, len(b)+1)
		rows[i][0] = i
	}
	for j := range rows[0] {
		rows[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			other := 1
			if a[i-1] == b[j-1] {
				other = 0
			}
			n := min(rows[i-1][j]+1, rows[i][j-1]+1, rows[i-1][j-1]+other)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				n = min(n, rows[i-2][j-2]+1)
			}
			rows[i][j] = n
		}
	}
	return rows[len(a)][len(b)]
}

// place finds out where in the file a problem is.
func (d *document) place(p problem) {
	for path := range d.bad {
		if rest, below := strings.CutPrefix(p.path, path); below && path != "" && (rest == "" || rest[0] == '.' || rest[0] == '[') {
			return // a consequence
		}
	}
	if name := d.names[p.path]; name != "" {
		d.problems = append(d.problems, located{source: name, msg: p.msg})
		return
	}
	n, path := d.at[p.path], p.path
	for n == nil && path != "" { // of something that is not there: what it is missing from
		path = path[:max(strings.LastIndexAny(path, ".["), 0)]
		n = d.at[path]
	}
	if n == nil {
		d.problems = append(d.problems, located{source: d.file, msg: problem{path: p.path, msg: p.msg}.Error()})
		return
	}
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	l := located{d.file, n.Line, n.Column, problem{path: p.path, msg: p.msg}.Error()}
	if p.line > 0 {
		if line, column, ok := d.within(n, p.line, p.column); ok && path == p.path {
			l.line, l.column = line, column
		} else {
			l.msg = p.Error() // at least where in the text
		}
	}
	d.problems = append(d.problems, l)
}

// within translates a position in the text of a scalar to one in the file. False:
// the text is not in the file as it is, because of escapes or folding.
func (d *document) within(n *yaml.Node, line, column int) (int, int, bool) {
	text := strings.Split(n.Value, "\n")
	if line > len(text) {
		return 0, 0, false
	}
	row := n.Line // from 1
	switch {
	case n.Style&yaml.LiteralStyle != 0:
		row += line // the text begins below the indicator
	case line > 1 || n.Style&yaml.FoldedStyle != 0:
		return 0, 0, false
	}
	if row > len(d.lines) {
		return 0, 0, false
	}
	raw := strings.TrimSuffix(d.lines[row-1], "\r")
	if n.Style&yaml.LiteralStyle != 0 {
		indent := len(raw) - len(text[line-1])
		if indent < 0 || raw[indent:] != text[line-1] {
			return 0, 0, false
		}
		return row, indent + column, true
	}
	start := n.Column - 1 // of the quote, if there is one
	if n.Style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle) != 0 {
		start++
	}
	// Columns of YAML are characters, and ours bytes.
	start = len(string([]rune(raw)[:min(start, len([]rune(raw)))]))
	if !strings.HasPrefix(raw[start:], text[0]) {
		return 0, 0, false
	}
	return row, start + column, true
}

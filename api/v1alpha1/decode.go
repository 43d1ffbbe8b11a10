// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// ParseTenant reads one Tenant from YAML or JSON. file is the name of the source
// in errors. The error has every unknown field, repeated field and value of a wrong
// type, each as <file>:<line>: <field>: <what is wrong>. What the values mean is
// judged by the API server.
func ParseTenant(file string, data []byte) (*Tenant, error) {
	t := &Tenant{}
	err := decodeStrict(file, data, t, func() field.ErrorList {
		return validateType(t.TypeMeta, GroupVersion.String(), "Tenant")
	})
	if err != nil {
		return nil, err
	}
	return t, nil
}

// decodeStrict reads the one YAML object in data into the struct that into points
// to, by its JSON tags. When the object has the right form, validate judges its
// values, and its faults get their lines here.
//
// sigs.k8s.io/yaml is strict as well, but it goes through JSON and loses the lines.
func decodeStrict(file string, data []byte, into any, validate func() field.ErrorList) error {
	d := &decoder{file: file, lines: map[string]int{}}
	stream := yaml.NewDecoder(bytes.NewReader(data))
	var document, next yaml.Node
	switch err := stream.Decode(&document); {
	case errors.Is(err, io.EOF):
		return fmt.Errorf("%s: is empty", file)
	case err != nil:
		return d.syntax(err)
	}
	switch err := stream.Decode(&next); {
	case err == nil:
		return fmt.Errorf("%s:%d: holds more than one object; put each into a file of its own", file, next.Line)
	case !errors.Is(err, io.EOF):
		return d.syntax(err)
	}
	root := document.Content[0]
	d.value(nil, root, reflect.ValueOf(into).Elem())
	if len(d.faults) == 0 {
		for _, fault := range validate() {
			d.fault(d.line(fault.Field, root.Line), fault.Error())
		}
	}
	slices.SortStableFunc(d.faults, func(a, b fault) int { return cmp.Compare(a.line, b.line) })
	errs := make([]error, len(d.faults))
	for i, f := range d.faults {
		errs[i] = fmt.Errorf("%s:%d: %s", file, f.line, f.text)
	}
	return errors.Join(errs...)
}

type decoder struct {
	file   string
	lines  map[string]int // by the path of the field
	faults []fault
}

type fault struct {
	line int
	text string
}

func (d *decoder) fault(line int, text string) {
	d.faults = append(d.faults, fault{line, text})
}

// line is where a field stands, or else the closest of its parents that is there.
func (d *decoder) line(path string, root int) int {
	for path != "" {
		if line, ok := d.lines[path]; ok {
			return line
		}
		path = path[:max(0, strings.LastIndexAny(path, ".["))]
	}
	return root
}

// syntax moves the line number of a YAML error to where the other errors have it.
func (d *decoder) syntax(err error) error {
	text := strings.TrimPrefix(err.Error(), "yaml: ")
	var line int
	if _, scanErr := fmt.Sscanf(text, "line %d:", &line); scanErr != nil {
		return fmt.Errorf("%s: not YAML: %s", d.file, text)
	}
	_, text, _ = strings.Cut(text, ": ")
	return fmt.Errorf("%s:%d: not YAML: %s", d.file, line, text)
}

var jsonUnmarshaler = reflect.TypeFor[json.Unmarshaler]()

// value decodes node into v, which is addressable.
func (d *decoder) value(path *field.Path, node *yaml.Node, v reflect.Value) {
	if node.Kind == yaml.AliasNode {
		node = node.Alias
	}
	if node.ShortTag() == "!!null" {
		return
	}
	switch {
	case v.Kind() == reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		d.value(path, node, v.Elem())
	case v.Addr().Type().Implements(jsonUnmarshaler):
		d.scalar(path, node, v)
	case v.Kind() == reflect.Struct:
		fields := map[string]reflect.Value{}
		jsonFields(v, fields)
		d.mapping(path, node, func(name string, key, value *yaml.Node) {
			member, ok := fields[name]
			if !ok {
				known := make([]string, 0, len(fields))
				for name := range fields {
					known = append(known, name)
				}
				slices.Sort(known)
				d.fault(key.Line, fmt.Sprintf("%s: unknown field; the fields here are %s", path.Child(name), strings.Join(known, ", ")))
				return
			}
			d.value(path.Child(name), value, member)
		})
	case v.Kind() == reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		d.mapping(path, node, func(name string, _, value *yaml.Node) {
			element := reflect.New(v.Type().Elem()).Elem()
			d.value(path.Key(name), value, element)
			v.SetMapIndex(reflect.ValueOf(name).Convert(v.Type().Key()), element)
		})
	case v.Kind() == reflect.Slice:
		if node.Kind != yaml.SequenceNode {
			d.fault(node.Line, fmt.Sprintf("%s: must be a list", path))
			return
		}
		v.Set(reflect.MakeSlice(v.Type(), len(node.Content), len(node.Content)))
		for i, item := range node.Content {
			d.lines[path.Index(i).String()] = item.Line
			d.value(path.Index(i), item, v.Index(i))
		}
	default:
		d.scalar(path, node, v)
	}
}

// mapping calls member for each pair of node once.
func (d *decoder) mapping(path *field.Path, node *yaml.Node, member func(name string, key, value *yaml.Node)) {
	if node.Kind != yaml.MappingNode {
		where := "the document"
		if path != nil {
			where = path.String()
		}
		d.fault(node.Line, where+": must be an object with fields")
		return
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(node.Content); i += 2 {
		key, value := node.Content[i], node.Content[i+1]
		if seen[key.Value] {
			d.fault(key.Line, fmt.Sprintf("%s: is there twice", path.Child(key.Value)))
			continue
		}
		seen[key.Value] = true
		d.lines[path.Child(key.Value).String()] = key.Line
		member(key.Value, key, value)
	}
}

func (d *decoder) scalar(path *field.Path, node *yaml.Node, v reflect.Value) {
	// A number or a date where text is wanted is a quoting mistake that YAML would
	// silently rewrite, such as a version of 1.10.
	isText := node.Kind == yaml.ScalarNode && node.ShortTag() == "!!str"
	if v.Kind() == reflect.String && !isText {
		d.fault(node.Line, fmt.Sprintf("%s: must be a string; put the value in quotes", path))
		return
	}
	var value any
	err := node.Decode(&value)
	if err == nil {
		var encoded []byte
		if encoded, err = json.Marshal(value); err == nil {
			err = json.Unmarshal(encoded, v.Addr().Interface())
		}
	}
	if err == nil {
		return
	}
	var mismatch *json.UnmarshalTypeError
	switch {
	case errors.As(err, &mismatch) && v.CanInt():
		d.fault(node.Line, fmt.Sprintf("%s: must be a whole number, not %q", path, node.Value))
	case errors.As(err, &mismatch) && v.Kind() == reflect.Bool:
		d.fault(node.Line, fmt.Sprintf("%s: must be true or false, not %q", path, node.Value))
	default:
		d.fault(node.Line, fmt.Sprintf("%s: %q: %v", path, node.Value, err))
	}
}

// jsonFields collects the fields of a struct by the names that JSON has for them.
func jsonFields(v reflect.Value, into map[string]reflect.Value) {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-":
		case name == "" && f.Anonymous:
			jsonFields(v.Field(i), into)
		case name != "":
			into[name] = v.Field(i)
		}
	}
}

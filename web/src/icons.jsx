// Small pictures, drawn with lines of the colour of the text.

const icon = (path) => () => (
  <svg class="icon" viewBox="0 0 24 24" aria-hidden="true">
    <path d={path} />
  </svg>
);

export const Again = icon("M20 11a8 8 0 1 0-2 6M20 4v7h-7");
export const Copy = icon("M9 9h11v11H9zM5 15H4V4h11v1");
export const Done = icon("M4 13l5 5L20 7");
export const Edit = icon("M4 20l1-5L16 4l4 4L9 19zM14 6l4 4");
export const New = icon("M12 5v14M5 12h14");
export const Send = icon("M12 19V5M5 12l7-7 7 7");
export const Settings = icon("M4 7h9M19 7h1M4 17h1M11 17h9M13 4.5v5h4v-5zM6 14.5v5h4v-5z");
export const Stop = icon("M7 7h10v10H7z");
export const Stone = icon(
  "M22 12a10 10 0 1 1-20 0 10 10 0 0 1 20 0M14.5 12a2.5 2.5 0 1 1-5 0 2.5 2.5 0 0 1 5 0" +
    "M12 6.5q3-1 4.5.5M17.5 12q1 3-.5 4.5M12 17.5q-3 1-4.5-.5M6.5 12q-1-3 .5-4.5",
);
